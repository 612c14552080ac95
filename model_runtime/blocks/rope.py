"""Tables of rotary position embeddings and their context extensions. Built once by the decoder, engine and workers.

Legend: P positions, R2 rotated pairs of channels (rotary_dim / 2).
"""

import math

import torch
from torch import Tensor

from model_runtime.config import RopeConfig
from model_runtime.ops.registry import RopeTable


def _llama3(rope: RopeConfig, frequency_R2: Tensor) -> Tensor:
    """Llama 3.1: long waves are slowed by the factor, short ones kept, those between interpolated."""
    wavelength_R2 = 2 * math.pi / frequency_R2
    keep_R2 = (rope.original_max_position / wavelength_R2 - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    keep_R2 = keep_R2.clamp(0, 1)
    return (1 - keep_R2) * frequency_R2 / rope.factor + keep_R2 * frequency_R2


def _yarn(rope: RopeConfig, frequency_R2: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a linear ramp over channels from keeping to dividing by the factor."""

    def channel(rotations: float) -> float:
        """The pair that turns that many times within the trained length."""
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(channel(rope.beta_fast)), 0)
    high = min(math.ceil(channel(rope.beta_slow)), rope.rotary_dim - 1)
    steps_R2 = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    divide_R2 = ((steps_R2 - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequency_R2 / rope.factor * divide_R2 + frequency_R2 * (1 - divide_R2)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """float32 [R2]: radians that each pair of channels turns per position; theta^(-2i / rotary_dim) (arXiv 2104.09864)
    with the extension applied."""
    exponents_R2 = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequency_R2 = 1.0 / (rope.theta**exponents_R2)
    if rope.divisors:
        frequency_R2 = frequency_R2 / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "linear":
        return frequency_R2 / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequency_R2)
    if rope.kind == "yarn":
        return _yarn(rope, frequency_R2)
    return frequency_R2


def rope_table(rope: RopeConfig, max_position: int, device: torch.device) -> RopeTable:
    """Cosines and sines of positions 0 .. max_position - 1, float32 [P, R2]."""
    positions_P = torch.arange(max_position, dtype=torch.float32)
    angles_PR2 = torch.outer(positions_P, inverse_frequencies(rope))
    return RopeTable(
        cos_PR2=angles_PR2.cos().mul_(rope.attention_factor).to(device),
        sin_PR2=angles_PR2.sin_().mul_(rope.attention_factor).to(device),
        interleaved=rope.interleaved,
    )
