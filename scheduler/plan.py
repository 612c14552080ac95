"""The contract between scheduler and runtime: one `StepPlan` goes in, one `StepResult` comes out.

Owned by the scheduler package, imported by `model_runtime` (beside `config` the only scheduler module that it may
import), used in the engine process. Both are frozen and flat: parallel `array` buffers that numpy and torch read
without a copy, no sets, no dictionaries keyed by request. Everything the runtime needs for a step is in the plan; the
runtime keeps no per-request state.

Legend: S sequences in the step, T tokens in the step, R rows that sample a token, M rows of these with a mask,
V vocabulary, P prompt rows that are scored, N sequences that are pooled, C hidden size, J images to encode, E spans of
image embeddings in the step, G runs of rows between two states.
"""

from array import array
from dataclasses import dataclass, field

INT = "i"  # int32
FLOAT = "f"  # float32
DOUBLE = "d"  # float64
UINT64 = "Q"  # uint64

NO_LOGPROBS = -1
"""Value of a `top_logprobs` entry that asks for no log-probabilities (0 asks for the chosen token's only)."""

FAILED_TOKEN = -1
"""Token id in a `StepResult` for a row whose logits were not finite, or of which bans and mask left none: that sequence
ends with an error, alone."""

NO_STATE = -1
"""In place of a state's slot: the state before the first token of a text."""

LOGPROB_FLOOR = -9999.0
"""Log-probability reported for an impossible token: JSON has no infinity."""


def ints(values: "list[int] | tuple[int, ...]" = ()) -> "array[int]":
    """An int32 buffer."""
    return array(INT, values)


def floats(values: "list[float] | tuple[float, ...]" = ()) -> "array[float]":
    """A float32 buffer."""
    return array(FLOAT, values)


def doubles(values: "list[float] | tuple[float, ...]" = ()) -> "array[float]":
    """A float64 buffer."""
    return array(DOUBLE, values)


def uints(values: "list[int] | tuple[int, ...]" = ()) -> "array[int]":
    """A uint64 buffer."""
    return array(UINT64, values)


def offsets() -> "array[int]":
    """The offsets of an empty ragged list: a single zero."""
    return array(INT, [0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """The rows of the batch that produce a new token, and how. Every per-row buffer has R entries."""

    rows: "array[int]" = field(default_factory=ints)
    """int32 [R]: index into the step's T tokens of the row whose logits are sampled."""
    temperature: "array[float]" = field(default_factory=floats)
    """float32 [R]: 0 is greedy (first maximum)."""
    top_k: "array[int]" = field(default_factory=ints)
    """int32 [R]: 0 is off."""
    top_p: "array[float]" = field(default_factory=floats)
    """float32 [R] in (0, 1]; 1 is off."""
    min_p: "array[float]" = field(default_factory=floats)
    """float32 [R] in [0, 1]; 0 is off."""
    seed: "array[int]" = field(default_factory=uints)
    """uint64 [R]: the stream of random numbers of this sequence, already mixed from (request seed, choice)."""
    counter: "array[int]" = field(default_factory=uints)
    """uint64 [R]: index of the output token being sampled; the random number is a function of (seed, counter)."""
    presence_penalty: "array[float]" = field(default_factory=floats)
    frequency_penalty: "array[float]" = field(default_factory=floats)
    repetition_penalty: "array[float]" = field(default_factory=floats)
    """float32 [R]: 0, 0 and 1 are off."""
    history_ids: "array[int]" = field(default_factory=ints)
    history_offsets: "array[int]" = field(default_factory=offsets)
    history_output_starts: "array[int]" = field(default_factory=ints)
    """Ragged int32 lists, offsets [R + 1]: prompt + output tokens of rows with a penalty (empty for others); the
    output tokens of row r begin at history_offsets[r] + history_output_starts[r]."""
    bias_ids: "array[int]" = field(default_factory=ints)
    bias_values: "array[float]" = field(default_factory=floats)
    bias_offsets: "array[int]" = field(default_factory=offsets)
    """Ragged lists, offsets [R + 1]: values added to logits before sampling; -inf bans a token. Carries logit_bias,
    bad words that are one token short of complete, and end tokens before min_tokens. Ids are unique within a row,
    except that a ban may repeat an id (adding -inf wins in any order)."""
    mask_rows: "array[int]" = field(default_factory=ints)
    """int32 [M], ascending: the rows (0 .. R - 1) that follow a grammar."""
    masks: "array[int]" = field(default_factory=ints)
    """int32 [M, ceil(V / 32)]: the row may only sample token t where bit t % 32 of word t // 32 is set."""
    top_logprobs: "array[int]" = field(default_factory=ints)
    """int32 [R]: NO_LOGPROBS, or how many alternatives to report beside the chosen token (0..20)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRows:
    """The prompt rows whose log-probability of the *next prompt token* is reported (prompt_logprobs, echo)."""

    rows: "array[int]" = field(default_factory=ints)
    """int32 [P]: index into the step's T tokens."""
    targets: "array[int]" = field(default_factory=ints)
    """int32 [P]: the prompt token that follows the row."""
    top_logprobs: "array[int]" = field(default_factory=ints)
    """int32 [P]: how many alternatives to report (0..20)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRows:
    """Sequences of which rows of the final norm's output are summed. Every per-sequence buffer has N entries."""

    rows: "array[int]" = field(default_factory=ints)
    """int32 [N]: index into the step's T tokens of the first one that counts."""
    counts: "array[int]" = field(default_factory=ints)
    """int32 [N], each >= 1: rows that count, from that one on."""
    sums: "array[float]" = field(default_factory=doubles)
    sum_offsets: "array[int]" = field(default_factory=offsets)
    """Ragged float64 lists, offsets [N + 1]: the C numbers that the earlier steps came to; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePixels:
    """One image, cut and resized by its model's recipe, its colours not yet normalised. Sides are pixels."""

    data: bytes | memoryview
    """uint8 [tiles, height, width, 3]"""
    tiles: int
    height: int
    width: int
    rows: int
    cols: int
    """Of the grid of tiles, as `vision.preprocess.common.Layout` counts them; 0 where the image is not cut."""
    image_height: int
    image_width: int
    """Before anything was resized."""

    @property
    def num_pixels(self) -> int:
        """What the tower is given; the unit of the encode budget."""
        return self.tiles * self.height * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageJobs:
    """Images that the tower encodes before the step's tokens are computed."""

    slots: "array[int]" = field(default_factory=ints)
    """int32 [J]: the name under which the runtime keeps the embeddings until the slot is dropped."""
    num_embeddings: "array[int]" = field(default_factory=ints)
    """int32 [J]: how many there must be."""
    pixels: tuple[ImagePixels, ...] = ()
    """[J]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpans:
    """Rows of the step that are embeddings of an image instead of a token's. Every buffer has E entries."""

    rows: "array[int]" = field(default_factory=ints)
    """int32 [E]: index into the step's T tokens of the first one."""
    lengths: "array[int]" = field(default_factory=ints)
    slots: "array[int]" = field(default_factory=ints)
    firsts: "array[int]" = field(default_factory=ints)
    """int32 [E]: which embedding of the image the first row takes; the following rows take those that follow."""
    starts: "array[int]" = field(default_factory=ints)
    ends: "array[int]" = field(default_factory=ints)
    """int32 [E]: positions in the sequence of the whole span, first and one past the last, of which the step may hold a
    part: what attention within an image sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRuns:
    """Where layers that go through a text with a state find it, and leave it. The step's rows are cut into runs, each
    of one sequence and each but for its last where a state is kept. Every buffer has G entries, all empty for a model
    without such layers."""

    ends: "array[int]" = field(default_factory=ints)
    """int32 [G], ascending: one past the last row of the run, which begins where the one before it ends."""
    reads: "array[int]" = field(default_factory=ints)
    """int32 [G]: slot of the state before its first row, or NO_STATE. A later run of the same sequence reads what the
    run before it wrote; nothing else that is read is written in the step before."""
    writes: "array[int]" = field(default_factory=ints)
    """int32 [G]: slot for the state behind its last row; what was there is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything the runtime does in one step. There are no phases: each sequence gets `query_lens[s]` tokens."""

    step_id: int
    """Counts up by one; a follower rank that sees a gap stops."""
    token_ids: "array[int]"
    """int32 [T]: the tokens to compute, sequence after sequence."""
    query_lens: "array[int]"
    """int32 [S], each >= 1: tokens of the sequence in this step; they sum to T."""
    kv_lens: "array[int]"
    """int32 [S]: tokens of the sequence in the KV cache after this step. The tokens of sequence s stand at positions
    kv_lens[s] - query_lens[s] .. kv_lens[s] - 1."""
    block_tables: "array[int]"
    """int32, sequence after sequence ceil(kv_lens[s] / block_size) block ids; position p of a sequence lies in slot
    p % block_size of its block p // block_size."""
    sample: SampleRows
    score: ScoreRows
    rope_positions: "array[int]" = field(default_factory=ints)
    """int32 [T, 3]: temporal, row and column position of each token for M-RoPE; empty where all three are the position
    in the sequence for every token."""
    drop_slots: "array[int]" = field(default_factory=ints)
    """int32: image embeddings to forget, before anything else is done."""
    encode: ImageJobs = field(default_factory=ImageJobs)
    images: ImageSpans = field(default_factory=ImageSpans)
    pool: PoolRows = field(default_factory=PoolRows)
    states: StateRuns = field(default_factory=StateRuns)
    adapted: "array[int]" = field(default_factory=ints)
    """int32, ascending: which of the S sequences the model's adapter is for."""
    free_blocks: "array[int]" = field(default_factory=ints)
    """int32: blocks with nothing in them that anybody will read, whose memory may go back to the system. Only in a plan
    without tokens, which computes nothing."""
    free_states: "array[int]" = field(default_factory=ints)
    """int32: the same of slots for states."""
    by_draft_model: bool = False
    """The draft model computes the step, not the model."""
    normed_slots: "array[int]" = field(default_factory=ints)
    """int32 [R], for a draft model that goes on from the output of the model's final norm: block * block_size + offset
    of the position after each sampled row, for which its own output stands in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    """Log-probabilities (natural logarithm of the softmax of the model's own logits, before bias, penalties and
    temperature) of N rows, finite: impossible is LOGPROB_FLOOR."""

    chosen: "array[float]" = field(default_factory=floats)
    """float32 [N]: of the sampled or target token; 0 where none was asked for."""
    ranks: "array[int]" = field(default_factory=ints)
    """int32 [N]: how many tokens are at least as likely as that one, itself counted, ties by lower id; 0 where none was
    asked for or logits were not finite."""
    top_ids: "array[int]" = field(default_factory=ints)
    top_values: "array[float]" = field(default_factory=floats)
    top_offsets: "array[int]" = field(default_factory=offsets)
    """Ragged, offsets [N + 1]: the most likely tokens, descending, ties by lower id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The whole answer to a StepPlan."""

    step_id: int
    token_ids: "array[int]"
    """int32 [R]: the sampled tokens, FAILED_TOKEN where logits were not finite."""
    sampled: RowLogprobs
    """R rows."""
    scored: RowLogprobs
    """P rows."""
    pooled: "array[float]" = field(default_factory=doubles)
    """float64 [N, C]: the sum of each pooled sequence so far, row by row in the order of positions."""
    failed_slots: "array[int]" = field(default_factory=ints)
    """int32: images of the plan's jobs that gave another number of embeddings than planned, or numbers that are not
    finite. Nothing is kept under these slots; what the step computed from them is void."""
