"""One long text through a model as the engine computes it: chunk by chunk over paged caches, whose blocks are in no
order; and rows of it computed again in other ways. Process of `firstlight validate`.

Legend: V vocabulary, H key/value heads, D channels of a head, B tokens in a block.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_runtime.align.product import Product
from model_runtime.kv_store import KVLayer
from model_runtime.latent_store import LatentLayer
from model_runtime.models.decoder import Decoder
from model_runtime.state_store import StateLayer
from scheduler.plan import NO_STATE, SampleRows, ScoreRows, StateRuns, StepPlan, ints

OTHER_CHUNK = 97
"""Tokens of a step where a text is cut in another way: no multiple of a block."""

OWN = 0
"""The one slot for states."""
GROUP = 64
"""Blocks that are in no order among each other; groups are, so that memory is touched as it is needed."""

SPREAD = 8
"""Equal parts of a text, at whose ends is looked, too."""

Logits = dict[int, Tensor]
"""[V] float32 by position."""
Slot = tuple[Tensor, ...]
"""What a layer's cache has of one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The largest difference between rows that were computed in two ways."""

    logits: float = 0.0
    """Relative to the largest of the row."""
    cache: float = 0.0
    """Of keys and values, relative to the largest of the token's in that layer."""
    position: int = -1
    """Where that of the logits is."""

    def with_logits(self, position: int, one_V: Tensor, other_V: Tensor) -> "Worst":
        """Not less than that of these two; what is not a number counts as infinite."""
        found = _relative(one_V, other_V)
        return replace(self, logits=found, position=position) if found > self.logits else self

    def with_cache(self, one: Sequence[Slot], other: Sequence[Slot]) -> "Worst":
        """The same of a token's keys and values in all layers."""
        found = self.cache
        for layer, other_layer in zip(one, other, strict=True):
            for part, other_part in zip(layer, other_layer, strict=True):
                found = max(found, _relative(part, other_part))
        return replace(self, cache=found)


def _relative(one: Tensor, other: Tensor) -> float:
    size = other.double().abs().max().clamp(min=1e-30)
    return float(((one.double() - other.double()).abs().max() / size).nan_to_num(float("inf")))


class LongText:
    """A text whose keys and values, or states, are in caches of its own."""

    def __init__(self, product: Product, ids: Sequence[int], seed: int = 0, decoder: Decoder | None = None) -> None:
        """`decoder` computes it; None: the product's."""
        self._product, self._ids = product, tuple(ids)
        self._decoder = decoder or product.decoder
        num_blocks = -(-len(ids) // product.block_size)
        self._kv = product.allocate(num_blocks, num_states=1)
        self._table = shuffled(num_blocks, random.Random(seed))

    @property
    def has_states(self) -> bool:
        """Whether layers keep states, which are of the text's end alone: then no row can be computed by itself."""
        return any(isinstance(layer, StateLayer) for layer in self._kv)

    @property
    def num_pools(self) -> int:
        """Tensors that hold the caches, each in pages of its own."""
        return sum(len(layer.pools) for layer in self._kv)

    def compute(self, chunk: int, wanted: Iterable[int], on_chunk: Callable[[int], bool]) -> Logits:
        """Logits at the positions wanted, of a text computed `chunk` tokens at a time. `on_chunk` is told how many are
        done, and says whether to go on."""
        positions, found, done = sorted(wanted), Logits(), 0
        while done < len(self._ids):
            until = min(done + chunk, len(self._ids))
            found |= self._step(done, until, [at for at in positions if done <= at < until])
            done = until
            if not on_chunk(done):
                break
        return found

    @torch.inference_mode()
    def rows(self, positions: Sequence[int], decoder: Decoder | None = None) -> Logits:
        """The logits of tokens whose predecessors are in the caches, each computed as an output token is; by another
        decoder, if one is given. Their keys and values are written, all of them before any are read."""
        blocks = [self._table[: position // self._product.block_size + 1] for position in positions]
        plan = StepPlan(
            step_id=0,
            token_ids=ints([self._ids[position] for position in positions]),
            query_lens=ints([1] * len(positions)),
            kv_lens=ints([position + 1 for position in positions]),
            block_tables=ints([block for table in blocks for block in table]),
            sample=SampleRows(),
            score=ScoreRows(),
        )
        assert not self.has_states, "a row by itself, of a model with states"
        decoder = decoder or self._decoder
        logits_RV = decoder.logits(decoder.forward(self._product.batch(plan), self._kv))
        return dict(zip(positions, logits_RV, strict=True))

    @torch.inference_mode()
    def _step(self, start: int, end: int, wanted: Sequence[int]) -> Logits:
        blocks = self._table[: -(-end // self._product.block_size)]
        plan = StepPlan(
            step_id=0,
            token_ids=ints(self._ids[start:end]),
            query_lens=ints([end - start]),
            kv_lens=ints([end]),
            block_tables=ints(blocks),
            sample=SampleRows(),
            score=ScoreRows(),
            states=StateRuns(ends=ints([end - start]), reads=ints([OWN if start else NO_STATE]), writes=ints([OWN])),
        )
        hidden_TC = self._decoder.forward(self._product.batch(plan), self._kv)
        if not wanted:
            return {}
        rows = torch.tensor([position - start for position in wanted], device=hidden_TC.device)
        return dict(zip(wanted, self._decoder.logits(hidden_TC.index_select(0, rows)), strict=True))

    def cached(self, position: int) -> list[Slot]:
        """Copies of what the caches have of a token, layer by layer."""
        return [tuple(part.clone() for part in parts) for parts in self._slots(position)]

    def restore(self, position: int, cached: Sequence[Slot]) -> None:
        """The inverse of `cached`."""
        for parts, kept in zip(self._slots(position), cached, strict=True):
            for part, value in zip(parts, kept, strict=True):
                part.copy_(value)

    def _slots(self, position: int) -> Iterator[Slot]:
        """Views of a token's parts, layer by layer."""
        block, offset = self._table[position // self._product.block_size], position % self._product.block_size
        for layer in self._kv:
            if not isinstance(layer, StateLayer):
                yield token_parts(layer, block, offset)


def token_parts(layer: KVLayer | LatentLayer, block: int, offset: int) -> Slot:
    """Views [H, D] of a token's key and value, or of its latent vector and rotated channels; with int8 the scales."""
    if isinstance(layer, LatentLayer):
        row_X, rank = layer.rows_NBX[block, offset], layer.latent_rank
        parts = row_X[:rank], row_X[rank:]
        return parts if layer.scales_NB2 is None else (*parts, layer.scales_NB2[block, offset])
    parts = layer.key_NHDB[block, :, :, offset], layer.value_NHBD[block, :, offset]
    return parts if layer.scales_NH2B is None else (*parts, layer.scales_NH2B[block, :, :, offset])


def shuffled(num_blocks: int, rng: random.Random) -> list[int]:
    """Block numbers, in no order within each group."""
    table: list[int] = []
    for start in range(0, num_blocks, GROUP):
        group = list(range(start, min(start + GROUP, num_blocks)))
        rng.shuffle(group)
        table += group
    return table


def checked_positions(length: int, chunk: int, block: int, windows: Iterable[int]) -> list[int]:
    """Where to look: around the edges of blocks, chunks and windows, at the end, and some in between."""
    edges = {block, chunk, *(window for window in windows if window), length // 2 // chunk * chunk}
    near = {edge + step for edge in edges for step in (-1, 0, 1)}
    spread = {round((length - 1) * part / SPREAD) for part in range(SPREAD + 1)}
    return sorted(position for position in near | spread if 0 <= position < length)


def compared_alone(text: LongText, logits: Logits, decoder: Decoder | None = None) -> Worst:
    """These rows computed by themselves, over the keys and values that the chunks left; by another decoder, if one is
    given. Where the keys and values of all rows are what that one makes of those before them, so by induction is the
    whole text: a long one costs what the rows that are looked at cost."""
    kept = {position: text.cached(position) for position in logits}
    worst = Worst()
    for position, other_V in text.rows(list(logits), decoder).items():
        worst = worst.with_logits(position, logits[position], other_V)
        worst = worst.with_cache(kept[position], text.cached(position))
        text.restore(position, kept[position])
    return worst


def compared_again(
    product: Product, ids: Sequence[int], text: LongText, logits: Logits, end: int, decoder: Decoder | None = None
) -> Worst:
    """The beginning of a text, up to `end`, from its first token on, in chunks of another length and in other blocks;
    by another decoder, if one is given."""
    other = LongText(product, ids[:end], seed=1, decoder=decoder)
    inside = {position: row_V for position, row_V in logits.items() if position < end}
    worst = Worst()
    for position, row_V in other.compute(OTHER_CHUNK, inside, lambda done: True).items():
        worst = worst.with_logits(position, inside[position], row_V)
        worst = worst.with_cache(text.cached(position), other.cached(position))
    return worst
