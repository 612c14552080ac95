"""The runtime as the engine sees it: load once, then one plan after the other. Engine process.

`load_executor` turns a checkpoint and the configuration into an `Executor`; what it learns on the way (block count,
model length, end tokens) is in `Executor.info` and nowhere else.
"""

import hashlib
import importlib.metadata
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import torch

from model_runtime.caches import allocate_caches
from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.config import RuntimeConfig, RuntimeInfo, cache_dir
from model_runtime.device import choose_device, default_budget, give_back_memory
from model_runtime.draft import NO_DRAFT, DraftPart, draft_model, load_draft
from model_runtime.graphs import SPARE_BLOCKS, block_size, on_device
from model_runtime.group import ALONE, Place, Ranks, meet
from model_runtime.images import ImageStore
from model_runtime.kv_store import storage_type
from model_runtime.leading import OtherRanks
from model_runtime.memory.budget import PlanError, PoolSize
from model_runtime.memory.meter import MemoryMeter, StepWatch, log_loaded
from model_runtime.memory.planning import RankNeeds, compute_threads, embedding_bytes, plan_rank
from model_runtime.memory.steps import step_tokens
from model_runtime.opening import open_checkpoint
from model_runtime.ops import describe, is_compiled, load_ops, set_threads
from model_runtime.ops.registry import Ops
from model_runtime.parallel import Mesh
from model_runtime.pipeline import Stage
from model_runtime.rank_stats import RankStats
from model_runtime.runner import Begun, Runner
from model_runtime.stripes import SharedSequences
from model_runtime.transport import SILENCE_SECONDS, Followers, PoolFacts
from model_runtime.weights.load import Precision
from model_runtime.weights.prepared import WeightCache
from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan, StepResult


class Executor:
    """Runs the steps that the scheduler plans, with the other ranks if there are any."""

    def __init__(
        self, runner: Runner, info: RuntimeInfo, others: OtherRanks | None = None, watch: StepWatch | None = None
    ) -> None:
        self._runner, self._others, self._watch = runner, others, watch
        self._begun: deque[Begun | StepResult] = deque()
        self.info = info
        """Facts of the loaded model and its KV pool."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step; the result has the plan's step_id."""
        self.begin(plan)
        return self.end()

    def begin(self, plan: StepPlan) -> None:
        """As much of a step as there is to do before other stages of a pipeline have done their part;
        `info.steps_in_flight` may have begun and not ended."""
        if self._watch is not None:
            self._watch.begins(plan)
        with nullcontext() if self._others is None else self._others.begin(plan):
            self._begun.append(self._runner.begin(plan))

    def end(self) -> StepResult:
        """The result of the step that began first."""
        with nullcontext() if self._others is None else self._others.end():
            result = self._runner.end(self._begun.popleft())
        if self._watch is not None:
            self._watch.ends()
        return result

    @property
    def ranks(self) -> tuple[RankStats, ...]:
        """What each rank has done, as far as is known; none for one alone."""
        return () if self._others is None else self._others.stats


def load_executor(
    model_path: Path,
    runtime: RuntimeConfig,
    scheduler: SchedulerConfig,
    progress: Callable[[str, float], None],
    place: Place | None = None,
) -> Executor:
    """`load_runner`, as the engine wants it. `place` is that of rank 0 where there are several, which it waits for; so
    long `progress` is called too."""
    if place is None:
        runner, info = load_runner(model_path, runtime, scheduler, progress)
        return Executor(runner, info, watch=StepWatch(MemoryMeter(torch.device(runtime.device)), info))
    silence = SILENCE_SECONDS if place.region is None else inf  # the supervisor watches those of this machine
    followers = Followers(place.endpoints, runtime.collective_timeout, silence)
    device = choose_device(runtime.device)
    compiled = is_compiled(load_ops(device, runtime.kernels))
    ranks = Ranks(
        mesh=meet(place, device, compiled, runtime.collective_timeout),
        ranks_here=place.ranks_here,
        agree=partial(followers.agree, wait=lambda: progress("waiting for the other ranks", 1.0)),
    )
    runner, info = load_runner(model_path, runtime, scheduler, progress, ranks)
    others = OtherRanks(followers, ranks.mesh, runner)
    return Executor(runner, info, others, StepWatch(MemoryMeter(device), info))


def load_runner(
    model_path: Path,
    runtime: RuntimeConfig,
    scheduler: SchedulerConfig,
    progress: Callable[[str, float], None],
    ranks: Ranks = ALONE,
) -> tuple[Runner, RuntimeInfo]:
    """Load the model, or this rank's share, and reserve its KV pool; `progress` gets (stage, fraction done).

    Raises CheckpointError for a model that cannot be read, PlanError, before it is loaded, for one that does not fit.
    """
    device = choose_device(runtime.device)
    _check_ranks(ranks, runtime, device)
    budget = (runtime.memory_budget or default_budget(device)) // ranks.ranks_here
    scheduler = replace(scheduler, block_size=block_size(device, scheduler.block_size))
    sequences = SharedSequences(ranks.mesh.context, scheduler.block_size)
    set_threads(compute_threads(runtime, ranks.ranks_here))
    progress("preparing kernels", 0.0)
    plain_ops = load_ops(device, runtime.kernels)
    ops = sequences.ops(plain_ops)
    layout, opened, meter = ranks.mesh.layout, open_checkpoint(model_path, runtime.image_folder), MemoryMeter(device)
    needs, pool = plan_rank(opened, layout, runtime, scheduler, device, plain_ops, budget)
    give_back_memory(device)  # as after loading
    before = meter.used()
    precision = Precision.of(runtime)
    model = load_model(
        opened,
        ops,
        device,
        lambda fraction: progress("loading weights", fraction),
        pool.max_model_len,
        precision,
        _weight_cache(runtime, plain_ops),
        ranks.mesh,
        whole_experts=runtime.enable_expert_parallel,
        offload=needs.offload,
    )
    part = load_draft(opened, scheduler, runtime, model, ops, device, precision, ranks.mesh.tensor)
    info = _info(model, part, needs, pool, describe(plain_ops, device), scheduler)
    info = _agreed(info, likeness(model, runtime, scheduler), ranks)
    if part is NO_DRAFT:
        info = replace(info, steps_in_flight=layout.pipeline_size)
    runner = _runner(model, part, info, ops, runtime, scheduler, device, ranks.mesh, sequences)
    give_back_memory(device)
    log_loaded(layout.rank, needs.weight_bytes, info.weight_bytes, meter.used() - before, info)
    return runner, info


def refused_ranks(count: int, device_type: str) -> str:
    """Why so many ranks cannot compute on a kind of device; empty where they can."""
    if count > 1 and device_type != "cpu":
        return "several ranks, as by tensor_parallel_size, are only for --device cpu"
    return ""


def _check_ranks(ranks: Ranks, runtime: RuntimeConfig, device: torch.device) -> None:
    """Raises PlanError for what several ranks cannot do."""
    if problem := refused_ranks(ranks.mesh.layout.size, device.type):
        raise PlanError(problem)
    if ranks.mesh.context.size != runtime.context_parallel_size:
        raise PlanError("context_parallel_size above 1 is only for serve and engine_bench, which start the ranks")


def likeness(model: LoadedModel, runtime: RuntimeConfig, scheduler: SchedulerConfig) -> str:
    """A digest of what ranks must have alike, for they may have been started with other options or files on another
    machine. Of the weights, those of the last norm, which every rank has whole."""
    computes = (runtime.kv_cache_dtype, runtime.kernels, runtime.quantization, runtime.activation_dtype)
    sizes = (runtime.tensor_parallel_size, runtime.context_parallel_size, runtime.pipeline_parallel_size)
    shares = (*sizes, runtime.enable_expert_parallel, runtime.encoder_cache_bytes)
    version = importlib.metadata.version("firstlight")
    alike = (version, model.config, model.kv_type, model.decoder.norm_C.tolist(), computes, shares, scheduler)
    return hashlib.sha256(repr(alike).encode()).hexdigest()


def _agreed(info: RuntimeInfo, likeness: str, ranks: Ranks) -> RuntimeInfo:
    """With no more room than the rank that has least."""
    facts = ranks.agree(PoolFacts(info.num_blocks, info.max_model_len, info.max_image_pixels, likeness))
    return replace(
        info,
        num_blocks=facts.num_blocks,
        max_model_len=facts.max_model_len,
        max_image_pixels=facts.max_image_pixels,
        kv_bytes=info.kv_bytes // info.num_blocks * facts.num_blocks,
    )


def _runner(
    model: LoadedModel,
    part: DraftPart,
    info: RuntimeInfo,
    ops: Ops,
    runtime: RuntimeConfig,
    scheduler: SchedulerConfig,
    device: torch.device,
    mesh: Mesh,
    sequences: SharedSequences,
) -> Runner:
    config, decoder = model.decoder.own, model.decoder
    on_cpu = device.type == "cpu"
    kv_type = storage_type(runtime.kv_cache_dtype, model.kv_type)
    num_blocks = info.num_blocks if on_cpu else info.num_blocks + SPARE_BLOCKS
    kv = allocate_caches(config, num_blocks, scheduler.block_size, kv_type, device, scheduler.num_states)
    vision = model.vision
    groups = mesh.tensor, mesh.context
    images = None if vision is None else ImageStore(vision.encoder, vision.table_CV, device, groups)
    served = decoder if on_cpu else on_device(decoder, kv, info.max_model_len, scheduler.max_num_seqs)
    draft = draft_model(scheduler, runtime, part, decoder, kv)
    stage = None
    if mesh.layout.pipeline_size > 1:
        method = None if scheduler.speculative_config is None else scheduler.speculative_config.method
        stage = Stage(decoder, mesh.pipeline, sequences, every_row=method == "mtp")
    return Runner(
        served,
        kv,
        scheduler.block_size,
        ops,
        images=images,
        bidirectional_images=config.bidirectional_images,
        draft=draft,
        final_norm=decoder.final_norm,
        stage=stage,
        sequences=sequences,
        expert_tokens=decoder.expert_tokens,
    )


def _weight_cache(runtime: RuntimeConfig, ops: Ops) -> WeightCache | None:
    """Only what compiled operations pack is worth keeping."""
    if not runtime.prepare_weights or not is_compiled(ops):
        return None
    return WeightCache(folder=cache_dir() / "prepared", shared=runtime.weight_pages == "shared")


def _info(
    model: LoadedModel,
    draft: DraftPart,
    needs: RankNeeds,
    pool: PoolSize,
    computes: str,
    scheduler: SchedulerConfig,
) -> RuntimeInfo:
    """`computes` says to people what computes."""
    config, images = model.decoder.own, needs.images
    kv_name = str(needs.kv_type).removeprefix("torch.")
    return RuntimeInfo(
        max_model_len=pool.max_model_len,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        eos_token_ids=config.eos_token_ids,
        generates=config.has_output,
        num_blocks=pool.num_blocks,
        block_size=needs.block_tokens,
        weight_bytes=model.weight_bytes + draft.weight_bytes,
        kv_bytes=pool.num_blocks * needs.block_bytes,
        has_states=config.delta is not None,
        state_bytes=needs.states,
        step_bytes=needs.largest_step + needs.score_bytes * pool.max_model_len,
        max_num_batched_tokens=step_tokens(config, scheduler),
        bytes_per_embedding=0 if images is None else embedding_bytes(config),
        max_image_pixels=needs.max_image_pixels,
        encoder_cache_bytes=0 if images is None else images.cache,
        draft_cost=draft.cost,
        adapts_images=config.adapter is not None,
        whole_span=config.image_span,
        description=f"{model.description}, KV cache in {kv_name}, {computes}",
    )
