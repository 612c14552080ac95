"""Ways to divide a model among devices, and whether each fits. Called by `command.py`.

A way is a configuration of `serve`; what serve would refuse is refused here with the same words.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from model_runtime.config import KVCacheDtype, Quantization, RuntimeConfig
from model_runtime.executor import refused_ranks
from model_runtime.graphs import block_size
from model_runtime.layout import Layout
from model_runtime.memory.budget import PlanError, PoolSize
from model_runtime.memory.offload import refused_offload
from model_runtime.memory.planning import Outline, RankNeeds, rank_needs
from model_runtime.ops import load_ops
from model_runtime.share import Share
from model_runtime.stages import rank_shares
from model_runtime.state_store import refused_states
from model_runtime.weights.load import Precision
from scheduler.config import SchedulerConfig
from server.config import ProcessConfig, ServeConfig
from server.plan.devices import Devices
from server.plan.units import size

PRECISIONS: tuple[tuple[Quantization, KVCacheDtype], ...] = (
    ("none", "auto"),
    ("none", "int8"),
    ("int8", "auto"),
    ("int8", "int8"),
    ("int4", "auto"),
    ("int4", "int8"),
    ("int4-g128", "auto"),
    ("int4-g128", "int8"),
)
"""Weights, and keys and values, from what loses least on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be served."""

    concurrency: int
    """Sequences at the same time."""
    runtime: RuntimeConfig
    """With the longest sequence, and what else is given."""
    scheduler: SchedulerConfig
    precisions: tuple[tuple[Quantization, KVCacheDtype], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How devices divide a model."""

    tensor: int
    context: int
    stages: int
    replicas: int
    whole_experts: bool = False

    @property
    def devices(self) -> int:
        """That it uses."""
        return self.tensor * self.context * self.stages * self.replicas

    def __str__(self) -> str:
        sizes = {"TP": self.tensor, "PP": self.stages, "CP": self.context, "DP": self.replicas}
        parts = [f"{name} {count}" for name, count in sizes.items() if count > 1]
        return " ".join([*parts, "EP"] if self.whole_experts else parts) or "one rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the ranks of a replica take, and what is left."""

    runtime: RuntimeConfig
    scheduler: SchedulerConfig
    budget: int
    """Of a rank."""
    ranks: tuple[RankNeeds, ...]
    pool: PoolSize | None
    """In the fullest rank; None where not even one sequence fits."""
    length: int
    """Of the longest sequence."""

    @property
    def fullest(self) -> RankNeeds:
        """The rank with the least room for blocks."""
        return min(self.ranks, key=lambda needs: (self.budget - self.without_kv(needs)) / max(1, needs.block_bytes))

    def without_kv(self, needs: RankNeeds) -> int:
        """Bytes that a rank takes beside keys and values."""
        images = 0 if needs.images is None else needs.images.cache
        return (
            needs.weight_bytes + needs.states + needs.exchange + images + needs.largest_step + self.by_position(needs)
        )

    def by_position(self, needs: RankNeeds) -> int:
        """Of rotations, and of scores where plain torch attends."""
        return (needs.position_bytes + needs.score_bytes) * self.length

    def kv(self, needs: RankNeeds) -> int:
        """Of the pool; without one, of one sequence."""
        blocks = -(-self.length // needs.block_tokens) if self.pool is None else self.pool.num_blocks
        return (blocks + needs.spare_blocks) * needs.block_bytes

    @property
    def sequences(self) -> int:
        """Of full length that fit at the same time."""
        return 0 if self.pool is None else self.pool.num_blocks // -(-self.length // self.fullest.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to serve a model."""

    split: Split
    quantization: Quantization
    kv_type: KVCacheDtype
    fit: Fit | None = None
    """None where it cannot be divided so."""
    problem: str = ""
    """Why it does not fit, or cannot be."""
    refused: str = ""
    """Why this version does not serve it, whether it fits or not."""

    @property
    def fits(self) -> bool:
        """Whether all sequences do at full length."""
        return not self.problem


def factors(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many, larger ones first."""
    if parts == 1:
        yield (count,)
        return
    for first in (number for number in range(count, 0, -1) if count % number == 0):
        yield from ((first, *others) for others in factors(count // first, parts - 1))


def splits(devices: Devices, has_experts: bool) -> list[Split]:
    """All that use every device, and one rank alone."""
    sizes = list(factors(devices.total, 4))
    sizes += [(1, 1, 1, 1)] if devices.total > 1 and devices.nodes == 1 else []
    return [
        Split(tensor=tensor, stages=stages, context=context, replicas=replicas, whole_experts=whole)
        for tensor, stages, context, replicas in sizes
        for whole in ((False, True) if has_experts and tensor * context > 1 else (False,))
    ]


def candidates(model: Outline, devices: Devices, asked: Asked) -> list[Candidate]:
    """Every split, in every precision that is asked for."""
    found: list[Candidate] = []
    for split in splits(devices, model.opened.config.experts is not None):
        try:
            runtime, shares = _runtime(split, devices, asked), _shares(model, split)
        except (ValueError, PlanError) as error:
            quantization, kv_type = asked.precisions[0]
            found.append(Candidate(split=split, quantization=quantization, kv_type=kv_type, problem=str(error)))
        else:
            found += [_fitted(model, devices, asked, split, pair, runtime, shares) for pair in asked.precisions]
    return found


def again(model: Outline, devices: Devices, asked: Asked, candidate: Candidate) -> Candidate:
    """The same split and precision, of something else that is asked."""
    split, pair = candidate.split, (candidate.quantization, candidate.kv_type)
    return _fitted(model, devices, asked, split, pair, _runtime(split, devices, asked), _shares(model, split))


def _shares(model: Outline, split: Split) -> list[Share]:
    """Raises PlanError where it cannot be divided so."""
    sizes = split.tensor, split.context, split.stages
    return rank_shares(model.opened.config, sizes, whole_experts=split.whole_experts)


def _runtime(split: Split, devices: Devices, asked: Asked) -> RuntimeConfig:
    return replace(
        asked.runtime,
        device=devices.kind,
        nnodes=devices.nodes,
        tensor_parallel_size=split.tensor,
        context_parallel_size=split.context,
        pipeline_parallel_size=split.stages,
        enable_expert_parallel=split.whole_experts,
    )


def _fitted(
    model: Outline,
    devices: Devices,
    asked: Asked,
    split: Split,
    precision: tuple[Quantization, KVCacheDtype],
    runtime: RuntimeConfig,
    shares: list[Share],
) -> Candidate:
    quantization, kv_type = precision
    runtime = replace(runtime, quantization=quantization, kv_cache_dtype=kv_type)
    refused = (
        refused_ranks(runtime.num_ranks, devices.kind)
        or refused_states(model.opened.config, runtime, asked.scheduler, devices.kind)
        or refused_offload(model.opened.config, runtime, devices.kind)
        or _refused_replicas(runtime, split.replicas)
    )
    candidate = Candidate(split=split, quantization=quantization, kv_type=kv_type, refused=refused)
    try:
        fit = _fit(model, devices, asked, split, runtime, shares)
    except PlanError as error:
        return replace(candidate, problem=str(error))
    return replace(candidate, fit=fit, problem=_problem(fit))


def _refused_replicas(runtime: RuntimeConfig, replicas: int) -> str:
    try:
        ServeConfig(process=ProcessConfig(data_parallel_size=replicas), runtime=runtime)
    except ValueError as error:
        return str(error)
    return ""


def _fit(
    model: Outline, devices: Devices, asked: Asked, split: Split, runtime: RuntimeConfig, shares: list[Share]
) -> Fit:
    """Raises PlanError for what no memory helps against."""
    sequences = -(-asked.concurrency // split.replicas)
    tokens = max(asked.scheduler.max_num_batched_tokens, sequences)
    device = torch.device(devices.kind)
    scheduler = replace(
        asked.scheduler,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        block_size=block_size(device, asked.scheduler.block_size),
    )
    ops = load_ops(device, runtime.kernels)
    model.check_rows(Precision.of(runtime), ops)
    budget = devices.budget(len(runtime.own_ranks) * split.replicas, runtime.memory_budget)
    ranks = tuple(
        rank_needs(model, share, _layout(split, rank), runtime, scheduler, device, ops, budget)
        for rank, share in enumerate(shares)
    )
    fit = Fit(
        runtime=runtime,
        scheduler=scheduler,
        budget=budget,
        ranks=ranks,
        pool=None,
        length=runtime.max_model_len,
    )
    try:
        return replace(fit, pool=fit.fullest.pool(runtime, scheduler, budget))
    except PlanError:
        return fit  # `_problem` has the numbers


def _layout(split: Split, rank: int) -> Layout:
    return Layout(rank=rank, tensor_size=split.tensor, context_size=split.context, pipeline_size=split.stages)


def _problem(fit: Fit) -> str:
    """Why not all sequences fit."""
    needs, wanted = fit.fullest, fit.scheduler.max_num_seqs
    if fit.pool is None:
        least = fit.without_kv(needs) + fit.kv(needs)
        return f"needs {size(least)} for one sequence, has {size(fit.budget)}"
    if fit.sequences < wanted:
        return f"holds {fit.sequences} of {wanted} sequences of full length"
    return ""
