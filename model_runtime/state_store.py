"""The states of layers that go through a text with one (delta rules): their tensors, one group a layer. Owned by the
runner, engine and worker processes.

A slot holds what such a layer knows of a text up to some token, whatever its length. Which slot belongs to whom is the
scheduler's business (`plan.StateRuns`); this file only holds the memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.huge_pages import huge_empty


@dataclass(frozen=True, slots=True)
class StateLayer:
    """States of one layer: N slots, P inputs before a row that its convolution takes, C channels of these, H value
    heads with K key and V value channels. float32."""

    conv_NPC: Tensor
    """The inputs of the last P rows, oldest first; zeros before the first one."""
    delta_NHKV: Tensor


def allocate_states(num_slots: int, past: int, channels: int, heads: int, key_dim: int, value_dim: int) -> StateLayer:
    """Reserve the slots of a layer, on CPU; pages are touched only when first written."""
    return StateLayer(
        huge_empty((num_slots, past, channels), torch.float32),
        huge_empty((num_slots, heads, key_dim, value_dim), torch.float32),
    )
