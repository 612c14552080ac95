"""What a rank takes of a model, before anything of it is loaded: weights, caches, the largest step, images.

Called by `executor.load_runner` before it loads, engine and worker processes, and by `firstlight plan`. Arithmetic on
configuration and headers alone; the parts come from the tables that the loader fills and from `memory_*.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from model_runtime.architecture import ModelConfig
from model_runtime.config import RuntimeConfig
from model_runtime.device import activation_dtype, usual_kv_dtype
from model_runtime.graphs import SPARE_BLOCKS, has_own_scores
from model_runtime.host import available_memory, usable_cores
from model_runtime.image_side import USUAL_SIDE, ImageSide
from model_runtime.kv_store import KVLayer, storage_type
from model_runtime.layout import Layout
from model_runtime.memory.budget import PlanError, PoolSize, size_pool
from model_runtime.memory.caches import cache_block_bytes, next_token_block_bytes, rope_bytes, state_bytes
from model_runtime.memory.images import ImageMemory, encode_bytes, image_pixels
from model_runtime.memory.offload import Offload, planned_offload, refused_offload
from model_runtime.memory.steps import FLOAT_BYTES, score_bytes, step_bytes
from model_runtime.memory.weights import (
    PlannedWeights,
    WeightPart,
    planned_weights,
    vision_bytes,
    weight_groups,
)
from model_runtime.models.decoder import decoder_table
from model_runtime.opening import Opened, next_token_parameters, open_checkpoint
from model_runtime.ops import is_compiled
from model_runtime.ops.cuda import suits_flash_attention
from model_runtime.ops.registry import Ops, select
from model_runtime.share import Share
from model_runtime.shared_memory import region_bytes
from model_runtime.stages import rank_shares
from model_runtime.state_store import refused_states
from model_runtime.weights.load import Precision, check_keys, check_rows
from scheduler.config import SchedulerConfig


class Outline:
    """A checkpoint with what plans of any layout have in common. Raises CheckpointError for files that do not fit the
    architecture."""

    def __init__(self, opened: Opened) -> None:
        self.opened, one_expert = opened, opened.is_declared
        table = decoder_table(opened.config, first_expert_only=one_expert)
        if not one_expert:
            check_keys(table, opened.source, opened.ignores)
        self._groups = weight_groups(table, opened.source, one_expert=one_expert)
        self._planned: dict[tuple[Share, Precision, Ops], PlannedWeights] = {}
        self.vision: Mapping[WeightPart, int] = {} if opened.side is None else vision_bytes(opened.side)
        """Bytes of its image side."""

    def weights(self, share: Share, how: Precision, ops: Ops) -> PlannedWeights:
        """What a rank has of the decoder. Many layouts have the same shares."""
        key = share, how, ops
        if key not in self._planned:
            self._planned[key] = planned_weights(self._groups, self.opened.source, share, how, ops)
        return self._planned[key]

    def check_rows(self, how: Precision, ops: Ops) -> None:
        """Raises PlanError for rows of 8 bits that no matrix of the model is for, whichever ranks have what."""
        if how.row_bits == 8:
            (whole,) = rank_shares(self.opened.config, (1, 1, 1), whole_experts=False)
            check_rows(how, self.weights(whole, how, ops).row_bits)

    @property
    def num_parameters(self) -> int:
        """Numbers of decoder and image side."""
        experts = self.opened.config.experts
        copies = 1 if experts is None else experts.num_experts
        decoder = sum(
            sum(parameter.numbers for parameter in group.alike) * (copies if group.stand_for_all else 1)
            for group in self._groups
        )
        return decoder + (0 if self.opened.side is None else self.opened.side.num_parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeeds:
    """What one rank takes, in bytes, whatever room there is."""

    layout: Layout
    share: Share
    own: ModelConfig
    """The architecture as wide as its share."""
    weights: PlannedWeights
    vision: Mapping[WeightPart, int]
    kv_type: torch.dtype
    block_bytes: int
    """Of a KV block in all layers of this rank."""
    block_tokens: int
    """That a block of all ranks that share sequences has."""
    spare_blocks: int
    states: int
    """Of slots for the states of all sequences that run or are kept."""
    position_bytes: int
    """Of tables, for each position of the longest sequence."""
    score_bytes: int
    """Of attention in plain torch, for each position of the longest sequence."""
    step: int
    """Temporary tensors of the largest step, beside those that encode images."""
    images: ImageMemory | None
    max_image_pixels: int
    exchange: int
    """Memory that ranks share to talk, of which this is one rank's part."""
    offload: Offload | None = None
    """Layers in host memory."""
    draft_weights: int = 0
    """Of a draft model, whose keys and values are in `block_bytes`."""

    @property
    def weight_bytes(self) -> int:
        """Of decoder, image side and draft model, on the device."""
        on_host = 0 if self.offload is None else self.offload.saved_bytes
        return self.weights.total + sum(self.vision.values()) + self.draft_weights - on_host

    @property
    def largest_step(self) -> int:
        """Temporary tensors at most: images are encoded before a step's tokens are computed."""
        return self.step if self.images is None else max(self.step, self.images.encode)

    def pool(self, runtime: RuntimeConfig, scheduler: SchedulerConfig, budget: int) -> PoolSize:
        """The pool in what is left of a budget. Raises PlanError where there is no room for one sequence."""
        return size_pool(
            self.own,
            runtime,
            scheduler,
            budget=budget - self.exchange - self.spare_blocks * self.block_bytes,
            weight_bytes=self.weight_bytes,
            block_bytes=self.block_bytes,
            step=self.step,
            position_bytes=self.position_bytes + self.score_bytes,
            images=self.images,
        )


def plan_rank(
    opened: Opened,
    layout: Layout,
    runtime: RuntimeConfig,
    scheduler: SchedulerConfig,
    device: torch.device,
    ops: Ops,
    budget: int,
) -> tuple[RankNeeds, PoolSize]:
    """What a rank will take of a model and its draft model, and the pool in what is left. Raises CheckpointError for
    what cannot be read, PlanError for what does not fit."""
    config = opened.config
    refused = refused_states(config, runtime, scheduler, device.type) or refused_offload(config, runtime, device.type)
    if refused:
        raise PlanError(refused)
    shares = rank_shares(config, layout.sizes, whole_experts=runtime.enable_expert_parallel)
    share, model = shares[layout.rank], Outline(opened)
    model.check_rows(Precision.of(runtime), ops)
    needs = rank_needs(model, share, layout, runtime, scheduler, device, ops, budget)
    weights, block_bytes = _draft_needs(opened, needs, runtime, scheduler, device, ops)
    needs = replace(needs, draft_weights=weights, block_bytes=needs.block_bytes + block_bytes)
    _check_host(needs.offload, len(runtime.own_ranks))
    return needs, needs.pool(runtime, scheduler, budget)


def _check_host(offload: Offload | None, ranks_here: int) -> None:
    """Raises PlanError where host memory has no room for the layers of so many ranks."""
    if offload is not None and (needed := offload.host_bytes * ranks_here) > (free := available_memory()):
        raise PlanError(f"offload_weights leaves {needed} bytes in host memory, where {free} are free: set it to less")


def offload_alone(opened: Opened, runtime: RuntimeConfig, ops: Ops) -> Offload | None:
    """Of the only rank, where nothing else is planned, as by align. Raises PlanError."""
    if not runtime.offload_weights:
        return None
    (share,) = rank_shares(opened.config, (1, 1, 1), whole_experts=False)
    offload = planned_offload(Outline(opened).weights(share, Precision.of(runtime), ops).layers, runtime)
    _check_host(offload, 1)
    return offload


def rank_needs(
    model: Outline,
    share: Share,
    layout: Layout,
    runtime: RuntimeConfig,
    scheduler: SchedulerConfig,
    device: torch.device,
    ops: Ops,
    budget: int,
) -> RankNeeds:
    """Of the rank of `layout` that has `share`; blocks are as long as the device wants them. The budget decides how
    large images may be. Raises PlanError for an image cache that is too small."""
    how = Precision.of(runtime)
    weights = model.weights(share, how, ops)
    own = share.narrowed(model.opened.config)
    dtype = activation_dtype(device, weights.embedding, exact=not how.row_bits)
    kv_type = storage_type(runtime.kv_cache_dtype, usual_kv_dtype(dtype, integer_rows=weights.row_bits > 0))
    threads = compute_threads(runtime, len(runtime.own_ranks)) if is_compiled(ops) else None
    has_scores = _attends_plainly(own, scheduler, ops, dtype, kv_type)
    images, largest = None, 0
    if model.opened.side is not None and share.is_first_stage:
        images, largest = image_memory(model.opened.side, own, runtime, scheduler, budget)
    return RankNeeds(
        layout=layout,
        share=share,
        own=own,
        weights=weights,
        vision=model.vision if share.is_first_stage else {},
        kv_type=kv_type,
        block_bytes=cache_block_bytes(own, scheduler.block_size, kv_type),
        block_tokens=scheduler.block_size * runtime.context_parallel_size,
        spare_blocks=0 if device.type == "cpu" else SPARE_BLOCKS,
        states=state_bytes(own) * scheduler.num_states,
        position_bytes=rope_bytes(own),
        score_bytes=score_bytes(own, runtime, scheduler) if has_scores else 0,
        step=step_bytes(own, runtime, scheduler, threads),
        images=images,
        max_image_pixels=largest,
        offload=planned_offload(weights.layers, runtime),
        exchange=_exchange_bytes(layout) if device.type == "cpu" and runtime.nnodes == 1 else 0,
    )


def _draft_needs(
    opened: Opened,
    needs: RankNeeds,
    runtime: RuntimeConfig,
    scheduler: SchedulerConfig,
    device: torch.device,
    ops: Ops,
) -> tuple[int, int]:
    """Bytes of a draft model's weights, and of what it adds to a KV block. The first stage has it."""
    config = scheduler.speculative_config
    if config is None or config.method not in ("draft", "self", "mtp") or not needs.share.is_first_stage:
        return 0, 0
    if device.type != "cpu":
        raise PlanError(f"the speculation method {config.method} runs on CPU only; ngram and suffix run anywhere")
    if config.method == "mtp":
        groups = weight_groups(next_token_parameters(opened), opened.source, one_expert=False)
        weights = planned_weights(groups, opened.source, needs.share, Precision.of(runtime), ops)
        return weights.total, next_token_block_bytes(needs.own, scheduler.block_size, needs.kv_type)
    if config.method == "self":
        return 0, 0
    draft = open_checkpoint(Path(config.model).expanduser())
    share = rank_shares(draft.config, (needs.layout.tensor_size, 1, 1), whole_experts=False)[needs.share.rank]
    own = rank_needs(Outline(draft), share, needs.layout, runtime, scheduler, device, ops, budget=0)
    return own.weights.total, own.block_bytes


def image_memory(
    side: ImageSide, config: ModelConfig, runtime: RuntimeConfig, scheduler: SchedulerConfig, budget: int
) -> tuple[ImageMemory, int]:
    """What images take, and the most pixels that one of them may have. Raises PlanError for a cache that holds none."""
    needed = side.usual_embeddings * embedding_bytes(config)
    if runtime.encoder_cache_bytes < needed:
        raise PlanError(
            f"encoder_cache_bytes {runtime.encoder_cache_bytes} is less than the {needed} bytes that an image of "
            f"{USUAL_SIDE} x {USUAL_SIDE} pixels takes in this model: raise encoder_cache_bytes"
        )
    largest = image_pixels(side.tower, side.largest_image, scheduler.max_encode_pixels, budget)
    return ImageMemory(cache=runtime.encoder_cache_bytes, encode=encode_bytes(side.tower, largest)), largest


def embedding_bytes(config: ModelConfig) -> int:
    """Of one embedding of an image in the encoder cache."""
    return FLOAT_BYTES * config.hidden_size * (1 + config.num_deepstack)


def _attends_plainly(
    config: ModelConfig, scheduler: SchedulerConfig, ops: Ops, dtype: torch.dtype, kv_type: torch.dtype
) -> bool:
    """Whether the scores of a whole sequence exist at a time: compiled code and flash attention go through keys in
    pieces."""
    if is_compiled(ops) or all(config.delta_layers):
        return False
    if ops.paged_attention != select("cuda").paged_attention or config.latent is not None or config.image_span:
        return True
    shape = (1, config.num_kv_heads, config.head_dim, scheduler.block_size)
    key_NHDB = torch.empty(shape, dtype=kv_type, device="meta")
    return not suits_flash_attention(dtype, KVLayer(key_NHDB, key_NHDB.transpose(2, 3))) or has_own_scores(config)


def compute_threads(runtime: RuntimeConfig, ranks_here: int) -> int:
    """Of each of so many ranks of this machine."""
    return runtime.threads or max(1, usable_cores() // ranks_here)


def _exchange_bytes(layout: Layout) -> int:
    return sum(region_bytes(len(group)) // len(group) for group in layout.areas if layout.rank in group)
