"""Rotary positions in two dimensions: half of a head's angles turn with the row, half with the column.

Made by `packed.py` once a batch, applied in `block.py`. Engine and worker processes.

Legend: T tokens, H heads, D head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosines and sines [T, D], float32."""

    cos_TD: Tensor
    sin_TD: Tensor

    def reordered(self, order_T: Tensor) -> "Rope":
        """The same for tokens taken in another order."""
        return Rope(self.cos_TD[order_T], self.sin_TD[order_T])


def axial_rope(positions_T2: Tensor, head_dim: int, theta: float, staggered: bool) -> Rope:
    """Angles for integer (row, column) positions [T, 2]; head_dim is a multiple of 4.

    Of the D/2 frequencies theta^(-2i/D), rows take the even ones; columns the same ones, or the odd ones if staggered.
    """
    step = torch.arange(0, head_dim, 2, dtype=torch.float, device=positions_T2.device)
    frequencies = 1.0 / theta ** (step / head_dim)
    rows, columns = frequencies[0::2], frequencies[1::2] if staggered else frequencies[0::2]
    position_T2 = positions_T2.float()
    angles = torch.cat([position_T2[:, :1] * rows, position_T2[:, 1:] * columns], dim=-1)
    angles_TD = torch.cat([angles, angles], dim=-1)
    return Rope(angles_TD.cos(), angles_TD.sin())


def rotate(x_THD: Tensor, rope: Rope) -> Tensor:
    """[T, H, D] -> [T, H, D] in x's dtype; numbers i and i + D/2 of a head form a pair. Computed in float32."""
    x = x_THD.float()
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * rope.cos_TD[:, None] + turned * rope.sin_TD[:, None]).to(x_THD.dtype)
