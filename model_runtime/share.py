"""How a model is cut over the ranks that share its layers: which heads, columns and tokens are whose. Arithmetic only.

Each rank computes `split` from the architecture and the number of ranks when it loads; weight tables say which of these
parts each of their tensors is cut by. Engine and worker processes.

Ranks wait for each other after attention and after the feed-forward block, so each of the two is divided as equally as
can be. Query heads come in groups that share a key/value head. A rank has whole groups; or, where the busiest rank has
less to do that way, groups are cut: those who have a part of one have a copy of its key/value head. (Not where heads
are no whole blocks of integers, which would have to be expanded, nor where all heads are normalised together, to which
each may contribute once.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from model_runtime.architecture import ModelConfig
from model_runtime.memory.budget import PlanError

Axis = Literal["heads", "kv_heads", "delta", "feed_forward", "expert", "shared", "vocabulary"]
"""What is divided among ranks; expert and shared are the columns of every expert and of the block beside them, delta
the key heads of layers with a state, each with its value heads."""

COLUMNS = 32
"""Columns of a feed-forward block stay together, where there are enough: integers have a scale for so many."""
TOKENS = 16
"""The same of the vocabulary, whose rows are packed in panels."""

NO_EXPERTS = "the model has no experts: leave enable_expert_parallel out"


@dataclass(frozen=True, slots=True)
class Part:
    """Units start .. stop - 1 of `total`."""

    start: int
    stop: int
    total: int

    @property
    def count(self) -> int:
        """Units."""
        return self.stop - self.start

    def of(self, numbers: int) -> slice:
        """Which of so many numbers it is: each unit has as many of them."""
        width, rest = divmod(numbers, self.total)
        assert rest == 0, f"{numbers} do not divide into {self.total} units"
        return slice(self.start * width, self.stop * width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one of `size` ranks has of a model."""

    rank: int
    size: int
    heads: Part
    kv_heads: Part
    delta: Part
    feed_forward: Part
    expert: Part
    experts: Part
    """Which experts it has, all or a part of the columns of each."""
    shared: Part
    vocabulary: Part
    layers: Part
    """Those of its stage."""
    stages: int = 1
    """That the layers are divided among."""

    @property
    def is_first_stage(self) -> bool:
        """Whether it has what is before and behind the layers."""
        return self.layers.start == 0

    def of_stage(self, layers: Part, stages: int) -> "Share":
        """Of some of the layers only."""
        return replace(self, layers=layers, stages=stages)

    def part(self, axis: Axis) -> Part:
        """By name."""
        part = getattr(self, axis)
        assert isinstance(part, Part)
        return part

    def narrowed(self, config: ModelConfig) -> ModelConfig:
        """An architecture of the layers of this rank, as wide as its part of them. What the architecture has by number
        of layer stays that of the whole model."""
        experts = config.experts
        if experts is not None:
            experts = replace(experts, intermediate_size=self.expert.count, shared_size=self.shared.count)
        delta = config.delta
        if delta is not None:
            in_group, key_heads = delta.value_heads // delta.key_heads, self.delta.count
            delta = replace(delta, key_heads=key_heads, value_heads=key_heads * in_group)
        group = config.num_heads // config.num_kv_heads
        before, after = self.heads.start - self.kv_heads.start * group, self.kv_heads.stop * group - self.heads.stop
        return replace(
            config,
            num_layers=self.layers.count,
            first_layer=self.layers.start,
            has_output=config.has_output and self.is_first_stage,
            num_heads=self.heads.count,
            absent_heads=(before, after),
            num_kv_heads=self.kv_heads.count,
            windowed_kv_heads=config.windowed_kv_heads * self.kv_heads.count // self.kv_heads.total,
            intermediate_size=self.feed_forward.count,
            experts=experts,
            delta=delta,
        )


def split(config: ModelConfig, size: int, *, whole_experts: bool = False) -> tuple[Share, ...]:
    """The shares of so many ranks; with `whole_experts` an expert belongs to one of them. Raises PlanError where there
    is not enough to divide."""
    _check(config, size, whole_experts)
    kv_heads, heads = _heads(config, size)
    key_heads = 1 if config.delta is None else config.delta.key_heads
    delta = [Part(0, 1, 1)] * size if config.delta is None else _parts(_divided(key_heads, size), key_heads)
    feed_forward = _columns(config.intermediate_size, 1, [0] * size)
    expert, experts, shared = _experts(config, size, whole_experts)
    vocabulary = vocabulary_parts(config.vocab_size, size)
    return tuple(
        Share(
            rank=rank,
            size=size,
            heads=heads[rank],
            kv_heads=kv_heads[rank],
            delta=delta[rank],
            feed_forward=feed_forward[rank],
            expert=expert[rank],
            experts=experts[rank],
            shared=shared[rank],
            vocabulary=vocabulary[rank],
            layers=Part(0, config.num_layers, config.num_layers),
        )
        for rank in range(size)
    )


def whole_experts_of(config: ModelConfig, size: int) -> list[Part]:
    """Which experts are whose among ranks that have all else of their layers. Raises PlanError."""
    if config.experts is None:
        raise PlanError(NO_EXPERTS)
    if (count := config.experts.num_experts) < size:
        raise PlanError(f"{count} experts cannot be divided among {size} ranks: set context_parallel_size to less")
    return _parts(_divided(count, size), count)


def _check(config: ModelConfig, size: int, whole_experts: bool) -> None:
    counts = {"query heads": config.num_heads, "tokens": config.vocab_size, "columns": config.intermediate_size}
    if config.experts is not None:
        counts["columns of shared experts"] = config.experts.shared_size or size
        counts["columns of an expert"] = size if whole_experts else config.experts.intermediate_size
        counts["experts"] = config.experts.num_experts if whole_experts else size
    elif whole_experts:
        raise PlanError(NO_EXPERTS)
    if config.delta is not None:
        counts["key heads of the delta rule"] = config.delta.key_heads
    if config.qk_norm == "row":
        counts["key/value heads that are normalised together"] = config.num_kv_heads
    if config.windowed_kv_heads:
        counts["key/value heads of layers that have fewer than others"] = config.num_kv_heads
    for what, count in counts.items():
        if count < size:
            raise PlanError(f"{count} {what} cannot be divided among {size} ranks: set tensor_parallel_size to less")


def _divided(count: int, size: int) -> list[int]:
    """Nearly equal numbers, larger ones first."""
    return [count // size + (index < count % size) for index in range(size)]


def _parts(counts: Sequence[int], total: int) -> list[Part]:
    """One after the other."""
    ends = list(accumulate(counts))
    return [Part(end - count, end, total) for count, end in zip(counts, ends, strict=True)]


def _heads(config: ModelConfig, size: int) -> tuple[list[Part], list[Part]]:
    """Key/value heads and query heads of each rank: groups stay whole unless that leaves more to the busiest rank."""

    def most(found: tuple[list[Part], list[Part]]) -> int:
        return max(kv_head.count + head.count for kv_head, head in zip(*found, strict=True))

    whole = _whole_groups(config, size)
    has_odd_blocks = (config.value_dim or config.head_dim) % COLUMNS > 0
    is_whole = has_odd_blocks or config.qk_norm == "row" or config.windowed_kv_heads > 0
    return whole if is_whole else min(whole, _equal_heads(config, size), key=most)


def _equal_heads(config: ModelConfig, size: int) -> tuple[list[Part], list[Part]]:
    """As `_heads`; a rank has every key/value head that one of its query heads needs."""
    groups, in_group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    heads = _parts(_divided(config.num_heads, size), config.num_heads)
    return [Part(part.start // in_group, -(-part.stop // in_group), groups) for part in heads], heads


def _whole_groups(config: ModelConfig, size: int) -> tuple[list[Part], list[Part]]:
    """As `_heads`; with more ranks than groups, a group is shared."""
    groups, in_group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    if size <= groups:
        counts = _divided(groups, size)
        return _parts(counts, groups), _parts([count * in_group for count in counts], config.num_heads)
    sharers = _divided(size, groups)
    kv_heads = [Part(group, group + 1, groups) for group, count in enumerate(sharers) for _ in range(count)]
    return kv_heads, _parts([heads for count in sharers for heads in _divided(in_group, count)], config.num_heads)


def _experts(config: ModelConfig, size: int, whole_experts: bool) -> tuple[list[Part], list[Part], list[Part]]:
    """Columns of each expert, experts, and columns of the block beside them, of each rank; any for a model without."""
    if config.experts is None:
        return [Part(0, 1, 1)] * size, [Part(0, 1, 1)] * size, [Part(0, 1, 1)] * size
    columns, count, chosen = config.experts.intermediate_size, config.experts.num_experts, config.experts.num_chosen
    if whole_experts:
        expert, experts = [Part(0, columns, columns)] * size, _parts(_divided(count, size), count)
    else:
        expert, experts = _columns(columns, chosen, [0] * size), [Part(0, count, count)] * size
    usual = [chosen * mine.count * some.count // count for mine, some in zip(expert, experts, strict=True)]
    shared = config.experts.shared_size
    return expert, experts, _columns(shared, 1, usual) if shared else [Part(0, 0, 1)] * size


def _columns(columns: int, work_of_column: int, work: Sequence[int]) -> list[Part]:
    """Unit by unit to the rank that has the least work so far."""
    size = len(work)
    unit = COLUMNS if columns % COLUMNS == 0 and columns // COLUMNS >= size else 1
    counts = [unit] * size
    for _ in range(columns // unit - size):
        totals = [done + work_of_column * count for done, count in zip(work, counts, strict=True)]
        counts[totals.index(min(totals))] += unit
    return _parts(counts, columns)


def vocabulary_parts(tokens: int, size: int) -> list[Part]:
    """Of each rank: whole panels, where there are enough."""
    unit = TOKENS if tokens >= TOKENS * size else 1
    ends = [min(tokens, unit * end) for end in accumulate(_divided(-(-tokens // unit), size))]
    return [Part(start, end, tokens) for start, end in zip([0, *ends], ends, strict=False)]
