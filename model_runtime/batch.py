"""A StepPlan as tensors: the ragged batch that every layer sees. Engine and worker processes.

Legend: S sequences, T tokens of the step, B tokens in a KV block, G runs of rows between two states, A rows that an
adapter changes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.plan import StepPlan

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRows:
    """Rows of the batch whose embedding is an image's; N of them from row `start` on."""

    start: int
    embeddings_NC: Tensor
    """float32: take the place of the tokens' embeddings (after their scale, if the model has one)."""
    deepstack_NC: tuple[Tensor, ...] = ()
    """float32: added to the hidden state after the first, second, ... layer (Qwen3-VL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRanges:
    """Which of the keys in a rank's cache rows may see, where it has some of each sequence's alone. All tensors are
    int32; T rows in S groups, each of one sequence, of which several groups may be."""

    query_starts_S1: Tensor
    """[S + 1]: rows of group s are query_starts[s] .. query_starts[s + 1] - 1."""
    kv_lens_S: Tensor
    """[S]: keys of its sequence that are in the cache, which lie one after the other in the blocks."""
    block_tables: Tensor
    """Flat: block ids."""
    table_starts_S: Tensor
    """[S]: where those of a group begin, as many as its keys need."""
    begins_T: Tensor
    """The first key that a row sees."""
    ends_T: Tensor
    """One past the last; the same as `begins` if it sees none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRows:
    """The rows of all ranks that share a step's sequences, rank after rank."""

    counts_N: Tensor
    """int64: how many each rank has."""
    order_T: Tensor
    """int64: the row of the step that each is."""
    positions_T: Tensor
    """In its sequence."""
    keys: KeyRanges
    """Of this rank's cache, without a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The `StateRuns` of a plan. All tensors are int32, in host memory."""

    starts_G1: Tensor
    """[G + 1]: rows of run g are starts[g] .. starts[g + 1] - 1."""
    reads_G: Tensor
    """[G]: slot of the state before the first row, or NO_STATE."""
    writes_G: Tensor
    """[G]: slot for the state behind the last row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of different lengths, concatenated without padding. All tensors are int32 unless said."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    """int64 [T]: where a token's key and value go: block id * B + offset in the block."""
    query_starts_S1: Tensor
    """[S + 1]: tokens of sequence s are rows query_starts[s] .. query_starts[s + 1] - 1."""
    kv_lens_S: Tensor
    """[S]: keys in the cache once this step's are written; the sequence's last query stands at kv_len - 1."""
    block_tables: Tensor
    """Flat: block ids, sequence after sequence."""
    table_starts_S1: Tensor
    """[S + 1]: block table of sequence s is block_tables[table_starts[s] : table_starts[s + 1]]."""
    block_size: int
    rope_rows_T: Tensor
    """Row of the rope table for each token: its position, unless the step has a table of its own (M-RoPE)."""
    rope_positions_T3: Tensor | None = None
    """[T, 3]: temporal, row and column positions, where they differ from the position in the sequence."""
    visible_ends_T: Tensor | None = None
    """[T], in models whose images attend in both directions, for steps with images: one past the last position that a
    token sees, which is the end of its image, or p + 1 outside of images. A window says where it begins as ever."""
    images: tuple[ImageRows, ...] = ()
    key_starts_S1: Tensor | None = None
    """[S + 1], on a GPU, where all block tables have the same length and the last entries of short ones mean nothing:
    where the keys of sequence s would begin if those of all stood in a row."""
    max_query_len: int = 0
    """On a GPU, which would make the CPU wait if it were asked: the most tokens that a sequence has in this step."""
    adapted_A: Tensor | None = None
    """int64, ascending: rows of the sequences that the model's adapter is for, if the step has some."""
    runs: Runs | None = None
    """For a model with layers that go through a text with a state."""
    shared: SharedRows | None = None
    """Where ranks share sequences (`stripes`): then all else is of this rank's rows and keys alone."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids_T.shape[0])

    @property
    def num_sequences(self) -> int:
        """S."""
        return int(self.kv_lens_S.shape[0])


def _starts(lengths: Int32) -> Int32:
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _visible_ends(plan: StepPlan, positions: Int32, ends: Int32) -> Int32:
    """[T]: the end of the image's span for rows of an image, p + 1 for others. `ends` [T]: keys of the sequence."""
    visible = positions + 1
    spans = plan.images
    for row, length, start, end in zip(spans.rows, spans.lengths, spans.starts, spans.ends, strict=True):
        rows = slice(row, row + length)
        inside = start <= positions[row] and positions[row] + length <= end <= ends[row]
        assert inside, f"a span at {start} .. {end} has rows at {positions[rows]} of {ends[row]} keys"
        visible[rows] = end
    return visible


def _rope_positions(plan: StepPlan) -> Tensor | None:
    if not plan.rope_positions:
        return None
    assert len(plan.rope_positions) == 3 * len(plan.token_ids), "rope_positions must be three a token"
    return torch.frombuffer(plan.rope_positions, dtype=torch.int32).view(-1, 3)


def _adapted(plan: StepPlan, sequence_T: NDArray[np.int64]) -> Tensor | None:
    if not plan.adapted:
        return None
    assert plan.adapted[-1] < len(plan.query_lens), "an adapter for a sequence that is not in the step"
    return torch.from_numpy(np.flatnonzero(np.isin(sequence_T, plan.adapted)))


def _runs(plan: StepPlan) -> Runs | None:
    states = plan.states
    if not states.ends:
        return None
    assert states.ends[-1] == len(plan.token_ids), "runs must cover the rows of a step"
    return Runs(
        starts_G1=torch.tensor([0, *states.ends], dtype=torch.int32),
        reads_G=torch.frombuffer(states.reads, dtype=torch.int32),
        writes_G=torch.frombuffer(states.writes, dtype=torch.int32),
    )


def make_batch(
    plan: StepPlan,
    block_size: int,
    images: tuple[ImageRows, ...] = (),
    bidirectional: bool = False,
) -> Batch:
    """Derive positions and slots from a plan, in host memory; `images` are the embeddings of its spans, `bidirectional`
    says that attention within an image goes both ways. Raises AssertionError where the plan contradicts itself."""
    query_lens = np.frombuffer(plan.query_lens, dtype=np.int32)
    kv_lens = np.frombuffer(plan.kv_lens, dtype=np.int32)
    tables = np.frombuffer(plan.block_tables, dtype=np.int32)
    query_starts, table_starts = _starts(query_lens), _starts(-(-kv_lens // block_size))
    assert query_starts[-1] == len(plan.token_ids), "query_lens must sum to the number of tokens"
    assert table_starts[-1] == len(tables), "block tables must cover kv_lens exactly"
    row_of_T = np.repeat(np.arange(len(query_lens)), query_lens)
    positions = np.arange(len(plan.token_ids), dtype=np.int32) + (kv_lens - query_lens - query_starts[:-1])[row_of_T]
    slots = tables[table_starts[row_of_T] + positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size
    positions = positions.astype(np.int32, copy=False)
    visible = _visible_ends(plan, positions, kv_lens[row_of_T]) if bidirectional and plan.images.rows else None
    positions_T = torch.from_numpy(positions)
    return Batch(
        token_ids_T=torch.frombuffer(plan.token_ids, dtype=torch.int32),
        positions_T=positions_T,
        slots_T=torch.from_numpy(slots),
        query_starts_S1=torch.from_numpy(query_starts),
        kv_lens_S=torch.from_numpy(kv_lens.copy()),
        block_tables=torch.from_numpy(tables.copy()),
        table_starts_S1=torch.from_numpy(table_starts),
        block_size=block_size,
        rope_rows_T=positions_T,
        rope_positions_T3=_rope_positions(plan),
        visible_ends_T=None if visible is None else torch.from_numpy(visible),
        images=images,
        adapted_A=_adapted(plan, row_of_T),
        runs=_runs(plan),
    )
