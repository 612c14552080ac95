"""Tables of rotary position embeddings and their context extensions. Built once by the decoder, engine and workers.

Legend: P positions, T tokens of the step, R2 rotated pairs of channels (rotary_dim / 2).
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from model_runtime.architecture import QueryGrowth, RopeConfig
from model_runtime.batch import Batch
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

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    steps_R2 = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    divide_R2 = ((steps_R2 - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequency_R2 / rope.factor * divide_R2 + frequency_R2 * (1 - divide_R2)


def inverse_frequencies(rope: RopeConfig, max_position: int) -> Tensor:
    """float32 [R2]: radians that each pair of channels turns per position; theta^(-2i / rotary_dim) (arXiv 2104.09864)
    with the extension applied. Of LongRoPE, those for sequences of up to `max_position` tokens."""
    exponents_R2 = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequency_R2 = 1.0 / (rope.theta**exponents_R2)
    is_long = bool(rope.long_divisors) and max_position > rope.original_max_position
    if divisors := rope.long_divisors if is_long else rope.divisors:
        frequency_R2 = frequency_R2 / torch.tensor(divisors, dtype=torch.float32)
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
    angles_PR2 = torch.outer(positions_P, inverse_frequencies(rope, max_position))
    return RopeTable(
        cos_PR2=angles_PR2.cos().mul_(rope.attention_factor).to(device),
        sin_PR2=angles_PR2.sin_().mul_(rope.attention_factor).to(device),
        interleaved=rope.interleaved,
        growth_P=None if rope.growth is None else _growth(rope.growth, max_position).to(device),
    )


def _growth(growth: QueryGrowth, max_position: int) -> Tensor:
    """float32 [P]"""
    steps_P = (torch.arange(max_position, dtype=torch.float64) + growth.offset) // growth.length
    return (1 + growth.rate * steps_P.log1p()).float()


def mrope_axes(rope: RopeConfig) -> Tensor:
    """int64 [R2]: which position of a token each pair turns by: 0 temporal, 1 row, 2 column."""
    if not rope.mrope_interleaved:
        axes = [index % 3 for index, length in enumerate(rope.mrope_sections) for _ in range(length)]
        return torch.tensor(axes)
    axes_R2 = torch.zeros(rope.rotary_dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        axes_R2[axis : 3 * rope.mrope_sections[axis] : 3] = axis
    return axes_R2


class Rotations:
    """The rope table of a model, from which each step takes what its tokens need."""

    def __init__(self, rope: RopeConfig, max_position: int, device: torch.device) -> None:
        self.table = rope_table(rope, max_position, device)
        self.axes_R2 = mrope_axes(rope).to(device) if rope.mrope_sections else None

    def of_step(self, batch: Batch) -> tuple[Batch, RopeTable]:
        """The batch and the table itself, whose rows are positions; or, where the batch says that rows and columns of
        images count, a table with a row for each token, and the batch pointing to these. A token whose three positions
        are equal gets the same numbers either way.

        Raises AssertionError for a batch with such positions if the model has no use for them, RuntimeError for
        positions outside the table.
        """
        if batch.rope_positions_T3 is None:
            return batch, self.table
        assert self.axes_R2 is not None, "the batch has rope positions, the model turns by the position alone"
        rows_TR2 = batch.rope_positions_T3[:, self.axes_R2].long()
        rows_T = torch.arange(batch.num_tokens, dtype=torch.int32, device=rows_TR2.device)
        return replace(batch, rope_rows_T=rows_T), RopeTable(
            cos_PR2=self.table.cos_PR2.gather(0, rows_TR2),
            sin_PR2=self.table.sin_PR2.gather(0, rows_TR2),
            interleaved=self.table.interleaved,
            growth_P=None if self.table.growth_P is None else self.table.growth_P[batch.positions_T],
        )
