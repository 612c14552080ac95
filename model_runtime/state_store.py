"""The states of layers that go through a text with one (delta rules): their tensors, one group a layer. Owned by the
runner, engine and worker processes.

A slot holds what such a layer knows of a text up to some token, whatever its length. Which slot belongs to whom is the
scheduler's business (`plan.StateRuns`); this file only holds the memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.config import RuntimeConfig
from model_runtime.huge_pages import huge_empty
from scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class StateLayer:
    """States of one layer: N slots, P inputs before a row that its convolution takes, C channels of these, H value
    heads with K key and V value channels. float32."""

    conv_NPC: Tensor
    """The inputs of the last P rows, oldest first; zeros before the first one."""
    delta_NHKV: Tensor

    @property
    def by_slot(self) -> tuple[Tensor, ...]:
        """All memory."""
        return self.conv_NPC, self.delta_NHKV

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """Memory by block: none."""
        return ()


def allocate_states(config: ModelConfig, num_slots: int) -> StateLayer:
    """Reserve the slots of a layer, on CPU; pages are touched only when first written."""
    rule = config.delta
    assert rule is not None and num_slots, "slots for states, of an architecture or a scheduler without them"
    return StateLayer(
        huge_empty((num_slots, rule.conv_width - 1, rule.channels), torch.float32),
        huge_empty((num_slots, rule.value_heads, rule.key_dim, rule.value_dim), torch.float32),
    )


def refused_states(config: ModelConfig, runtime: RuntimeConfig, scheduler: SchedulerConfig, device_type: str) -> str:
    """Why a model with states cannot be served so; empty where it can, and for other models."""
    if config.delta is None:
        return ""
    speculative = scheduler.speculative_config
    if speculative is not None and speculative.method in ("self", "mtp"):
        return (
            f"the speculative method {speculative.method} is not supported for {config.family}, whose layers have "
            "states: use ngram, suffix, or draft with a model without states"
        )
    if runtime.context_parallel_size > 1:
        return (
            f"context_parallel_size above 1 is not supported for {config.family}, whose layers go through a text in "
            "order: use tensor_parallel_size or pipeline_parallel_size"
        )
    return "" if device_type == "cpu" else f"{config.family} has layers with states, which run on --device cpu only"
