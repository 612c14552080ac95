"""The product as `firstlight align` compares it: a loaded decoder with the caches, batches and types that it serves
with. Process of that command.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from model_runtime import host
from model_runtime.align.measure import Precisions
from model_runtime.architecture import ModelConfig
from model_runtime.batch import Batch, ImageRows, make_batch
from model_runtime.caches import Caches, allocate_caches
from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.config import RuntimeConfig
from model_runtime.device import choose_device
from model_runtime.device_batch import upload
from model_runtime.executor import refused_ranks
from model_runtime.graphs import block_size
from model_runtime.kv_store import storage_type
from model_runtime.memory.budget import PlanError, model_length
from model_runtime.memory.caches import rope_bytes
from model_runtime.memory.offload import Offload, refused_offload
from model_runtime.memory.planning import offload_alone
from model_runtime.models.decoder import Decoder
from model_runtime.opening import Opened, open_checkpoint
from model_runtime.ops import describe, is_compiled, load_ops, set_threads
from model_runtime.ops.registry import Ops
from model_runtime.parallel import Alone, Collectives, tensor_mesh
from model_runtime.shared_collectives import SharedMemoryCollectives
from model_runtime.shared_memory import make_region
from model_runtime.weights.load import Precision, check_rows
from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Of one checkpoint and configuration."""

    model: LoadedModel
    device: torch.device
    kv_type: torch.dtype
    block_size: int
    quantization: str
    """Of its options."""
    computes: str
    """For people: with what."""

    @property
    def decoder(self) -> Decoder:
        """Of the language model."""
        return self.model.decoder

    @property
    def positions(self) -> int:
        """Of the longest text."""
        return len(self.decoder.rotations.table.cos_PR2)

    @property
    def precisions(self) -> Precisions:
        """In which it computes."""
        hidden = self.decoder.dtype
        rows = {0: hidden, 8: torch.int8, 16: torch.int16}[self.decoder.parameters.row_bits]
        is_summed = self.decoder.share.size > 1
        return Precisions(hidden=hidden, rows=rows, cache=self.kv_type, is_summed=is_summed)

    def allocate(self, num_blocks: int, num_states: int = 1) -> Caches:
        """Caches of all layers, and states for so many sequences."""
        return allocate_caches(self.decoder.own, num_blocks, self.block_size, self.kv_type, self.device, num_states)

    def batch(self, plan: StepPlan, images: tuple[ImageRows, ...] = ()) -> Batch:
        """On the device."""
        batch = make_batch(plan, self.block_size, images, self.decoder.config.bidirectional_images)
        return batch if self.device.type == "cpu" else upload(batch, self.device)


def load_product(path: Path, runtime: RuntimeConfig, progress: Callable[[float], None]) -> Product:
    """Of one rank. Raises CheckpointError, PlanError."""
    assert runtime.num_ranks == 1, "the product of one of several ranks is asked for"
    return load_ranks(open_product(path, runtime), progress)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedProduct:
    """A checkpoint of which no tensor is read yet, and what the options come to for it."""

    opened: Opened
    runtime: RuntimeConfig
    device: torch.device
    ops: Ops
    positions: int


def load_ranks(product: OpenedProduct, progress: Callable[[float], None]) -> list[Product]:
    """Of each rank that shares the layers. Raises CheckpointError, PlanError."""
    runtime, size = product.runtime, product.runtime.tensor_parallel_size
    set_threads(max(1, (runtime.threads or host.usable_cores()) // size))
    if size == 1:
        return [_loaded(product, Alone(), progress, offload_alone(product.opened, runtime, product.ops))]
    ranks = _ranks(size, runtime.collective_timeout)
    return [_loaded(product, rank, progress) for rank in ranks]


def open_product(path: Path, runtime: RuntimeConfig) -> OpenedProduct:
    """Raises CheckpointError, PlanError for what can be refused before any tensor is read."""
    device, size = choose_device(runtime.device), runtime.tensor_parallel_size
    opened = open_checkpoint(path, runtime.image_folder)
    if problem := refused_ranks(runtime.num_ranks, device.type):
        raise PlanError(problem)
    if problem := refused_offload(opened.config, runtime, device.type):
        raise PlanError(problem)
    if size < runtime.num_ranks:
        raise PlanError("align divides layers alone: set pipeline_parallel_size and context_parallel_size to 1")
    positions = _positions(opened.config, runtime, size)
    ops = load_ops(device, runtime.kernels)
    if size > 1 and not is_compiled(ops):
        raise PlanError("align with several ranks needs the compiled kernels, through whose memory they speak")
    return OpenedProduct(opened=opened, runtime=runtime, device=device, ops=ops, positions=positions)


def _positions(config: ModelConfig, runtime: RuntimeConfig, size: int) -> int:
    """Of the longest text. Raises PlanError where its tables do not fit, or nothing can follow what the model sums."""
    if config.depth_group:
        raise PlanError(
            "align follows one sum through all layers, and this model mixes several (block attention residuals)"
        )
    positions = model_length(config, runtime)
    taken, budget = size * rope_bytes(config) * positions, host.default_budget()
    if taken > budget:
        raise PlanError(
            f"rotations of {positions} positions take {taken / 2**30:.4g} GiB, and {budget / 2**30:.4g} GiB may be "
            "taken: set max_model_len to less"
        )
    return positions


def _ranks(size: int, timeout_seconds: float) -> list[Collectives]:
    """Of threads of this process."""
    descriptor = make_region(size)
    try:
        return [SharedMemoryCollectives(descriptor, rank, size, timeout_seconds) for rank in range(size)]
    finally:
        os.close(descriptor)


def _loaded(
    product: OpenedProduct, rank: Collectives, progress: Callable[[float], None], offload: Offload | None = None
) -> Product:
    runtime, ops, device, precision = product.runtime, product.ops, product.device, Precision.of(product.runtime)
    model = load_model(
        product.opened,
        ops,
        device,
        progress,
        product.positions,
        precision,
        mesh=tensor_mesh(rank),
        whole_experts=runtime.enable_expert_parallel,
        offload=offload,
    )
    check_rows(precision, model.decoder.parameters.row_bits)
    return Product(
        model=model,
        device=device,
        kv_type=storage_type(runtime.kv_cache_dtype, model.kv_type),
        block_size=block_size(device, SchedulerConfig().block_size),
        quantization=runtime.quantization,
        computes=describe(ops, device),
    )
