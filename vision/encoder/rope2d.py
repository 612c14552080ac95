"""Rotary positions in two dimensions: half of a head's angles turn with the row, half with the column.

Made by `packed.py` once a batch, applied in `block.py`. Engine and worker processes.

Legend: T tokens, H heads, D head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vision.tower_config import Axial


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosines and sines [T, D], float32; a pair is numbers 2i and 2i + 1 of a head, or else i and i + D/2."""

    cos_TD: Tensor
    sin_TD: Tensor
    neighbours: bool

    def reordered(self, order_T: Tensor) -> "Rope":
        """The same for tokens taken in another order."""
        return Rope(self.cos_TD[order_T], self.sin_TD[order_T], self.neighbours)


def axial_rope(positions_T2: Tensor, head_dim: int, theta: float, axial: Axial) -> Rope:
    """Angles for integer (row, column) positions [T, 2]; head_dim is a multiple of 4.

    Of the D/2 frequencies theta^(-2i/D), rows take the even ones; columns the same ones, or if staggered the odd ones.
    Interleaved, columns and rows take turns frequency by frequency, over pairs of neighbours.
    """
    step = torch.arange(0, head_dim, 2, dtype=torch.float, device=positions_T2.device)
    frequencies = 1.0 / theta ** (step / head_dim)
    rows, columns = frequencies[0::2], frequencies[1::2] if axial == "staggered" else frequencies[0::2]
    position_T2 = positions_T2.float()
    row_angles, column_angles = position_T2[:, :1] * rows, position_T2[:, 1:] * columns
    if axial == "interleaved":
        angles = torch.stack([column_angles, row_angles], dim=-1).flatten(1)
        angles_TD = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat([row_angles, column_angles], dim=-1)
        angles_TD = torch.cat([angles, angles], dim=-1)
    # in float64, since torch's float32 results depend on where in the tensor a number stands
    wide_TD = angles_TD.double()
    return Rope(wide_TD.cos().float(), wide_TD.sin().float(), axial == "interleaved")


def rotate(x_THD: Tensor, rope: Rope) -> Tensor:
    """[T, H, D] -> [T, H, D] in x's dtype: each pair turned by its angle. Computed in float32."""
    x = x_THD.float()
    if rope.neighbours:
        turned = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    return (x * rope.cos_TD[:, None] + turned * rope.sin_TD[:, None]).to(x_THD.dtype)
