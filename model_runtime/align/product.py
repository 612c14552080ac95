"""The product as `firstlight align` compares it: a loaded decoder with the caches, batches and types that it serves
with. Process of that command.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from model_runtime.align.measure import Precisions
from model_runtime.batch import Batch, make_batch
from model_runtime.caches import Caches, allocate_caches
from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.config import RuntimeConfig
from model_runtime.device import choose_device
from model_runtime.device_batch import upload
from model_runtime.graphs import block_size
from model_runtime.host import usable_cores
from model_runtime.kv_store import storage_type
from model_runtime.models.decoder import Decoder
from model_runtime.ops import describe, load_ops, set_threads
from model_runtime.weights.load import Precision
from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Of one checkpoint and configuration."""

    model: LoadedModel
    device: torch.device
    kv_type: torch.dtype
    block_size: int
    computes: str
    """For people: with what."""

    @property
    def decoder(self) -> Decoder:
        """Of the language model."""
        return self.model.decoder

    @property
    def precisions(self) -> Precisions:
        """In which it computes."""
        hidden = self.decoder.dtype
        integer_rows = self.decoder.parameters.integer_rows
        return Precisions(hidden=hidden, rows=torch.int16 if integer_rows else hidden, cache=self.kv_type)

    def allocate(self, num_blocks: int) -> Caches:
        """Caches of all layers."""
        return allocate_caches(self.decoder.own, num_blocks, self.block_size, self.kv_type, self.device)

    def batch(self, plan: StepPlan) -> Batch:
        """On the device."""
        batch = make_batch(plan, self.block_size)
        return batch if self.device.type == "cpu" else upload(batch, self.device)


def load_product(path: Path, runtime: RuntimeConfig, progress: Callable[[float], None]) -> Product:
    """Raises CheckpointError, PlanError."""
    device = choose_device(runtime.device)
    set_threads(runtime.threads or usable_cores())
    ops = load_ops(device, runtime.kernels)
    precision = Precision(quantization=runtime.quantization, integer_rows=runtime.activation_dtype == "auto")
    model = load_model(path, ops, device, progress, precision=precision)
    return Product(
        model=model,
        device=device,
        kv_type=storage_type(runtime.kv_cache_dtype, model.kv_type),
        block_size=block_size(device, SchedulerConfig().block_size),
        computes=describe(ops, device),
    )
