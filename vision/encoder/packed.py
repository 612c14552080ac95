"""The NaViT over images of any size, packed into one sequence: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Pixtral, MoonViT.

Called by `model.py`; engine and worker processes. Holds weights, keeps no state.

Legend: T patches of all images, K numbers in a patch, C hidden size, G rows of a table of positions, M merged cells
(merge_size x merge_size patches that stand together in the sequence).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vision.encoder.attention import attend_segments
from vision.encoder.block import Block
from vision.encoder.parameters import Parameters
from vision.encoder.rope2d import axial_rope
from vision.tower_config import PackedConfig

Grid = tuple[int, int]
"""Rows and columns of patches of one image; multiples of merge_size."""


@dataclass(frozen=True, slots=True)
class PackedFeatures:
    """What the tower computed: [T, C] after the last block, and the same after each of its deepstack blocks."""

    last_TC: Tensor
    deepstack_TC: tuple[Tensor, ...]


def block_order(rows: int, columns: int, merge_size: int) -> Tensor:
    """[rows x columns, 2] int64 (row, column) of an image's patches in sequence: cell by cell, in rows within each."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    cells = torch.stack([row, column], dim=-1).reshape(
        rows // merge_size, merge_size, columns // merge_size, merge_size, 2
    )
    return cells.transpose(1, 2).reshape(-1, 2)


def window_order(grids: Sequence[Grid], merge_size: int, window_cells: int) -> tuple[Tensor, list[int]]:
    """The order [M] int64 of merged cells in which windows are contiguous, and each window's length in patches.

    Windows tile an image from its top left corner; those at the right and bottom may be smaller.
    """
    order: list[int] = []
    lengths: list[int] = []
    for rows, columns in grids:
        first, width = len(order), columns // merge_size
        cells = [(row, column) for row in range(rows // merge_size) for column in range(width)]
        windows = [(row // window_cells, column // window_cells) for row, column in cells]
        order += [first + index for _, index in sorted(zip(windows, range(len(cells)), strict=True))]
        sizes = Counter(windows)
        lengths += [sizes[window] * merge_size**2 for window in sorted(sizes)]
    return torch.tensor(order), lengths


def _cubic(distance: Tensor) -> Tensor:
    """Keys' convolution kernel with a = -3/4 at distances up to 2."""
    a = -0.75
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, far)


def _cubic_taps(size: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the middles of `size` equal parts of `side` table rows fall: rows and weights [size, 4]."""
    source = (torch.arange(size, dtype=torch.float32, device=device) + 0.5) * side / size - 0.5
    rows = source.floor()[:, None] + torch.arange(-1, 3, device=device)
    return rows.long().clamp(0, side - 1), _cubic((source[:, None] - rows).abs())


def _linear_taps(size: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where `size` points spread evenly over `side` table rows, ends on ends, fall: rows and weights [size, 2]."""
    source = torch.arange(size, dtype=torch.float32, device=device) * (side - 1) / max(size - 1, 1)
    below = source.floor()
    rows = torch.stack([below, below + 1], dim=-1)
    weights = (1 - (source[:, None] - rows).abs()).clamp(min=0)
    return rows.long().clamp(max=side - 1), weights


def resampled_positions(table_GC: Tensor, grid: Grid, bicubic: bool) -> Tensor:
    """[rows, columns, C] float32: a square table of positions, G = side x side, resampled to a grid.

    Bilinearly with the corners of table and grid aligned; or bicubically with their outer edges aligned.
    """
    side, taps = round(len(table_GC) ** 0.5), _cubic_taps if bicubic else _linear_taps
    table = table_GC.reshape(side, side, -1)
    (row_taps, row_weights), (column_taps, column_weights) = (taps(size, side, table.device) for size in grid)
    rows = (table[row_taps] * row_weights[:, :, None, None]).sum(dim=1)
    return (rows[:, column_taps] * column_weights[None, :, :, None]).sum(dim=2)


class PackedTower:
    """Patches in, one feature per patch out, in the same order."""

    def __init__(self, config: PackedConfig, parameters: Parameters) -> None:
        self.config, self.parameters = config, parameters
        self.blocks = [Block(config.block, layer, parameters) for layer in range(config.num_layers)]

    def _embedded(self, patches_TK: Tensor, grids: Sequence[Grid], positions: Sequence[Tensor]) -> Tensor:
        x_TC = self.parameters.linear(patches_TK, "patch")
        if self.config.position_key is not None:
            table_GC = self.parameters.vectors["position"].reshape(-1, x_TC.shape[1])
            learned = [
                resampled_positions(table_GC, grid, self.config.position_bicubic)[where[:, 0], where[:, 1]]
                for grid, where in zip(grids, positions, strict=True)
            ]
            x_TC = x_TC + torch.cat(learned)
        if self.config.pre_norm_key is not None:
            x_TC = self.parameters.normed(x_TC, "pre_norm", self.config.block.norm, self.config.block.norm_eps)
        return x_TC

    def forward(self, patches_TK: Tensor, grids: Sequence[Grid]) -> PackedFeatures:
        """Patches [T, K] of images one after the other, each in the order of `block_order`."""
        config = self.config
        device = patches_TK.device
        positions = [block_order(*grid, config.merge_size).to(device) for grid in grids]
        x_TC = self._embedded(patches_TK, grids, positions)
        rope = axial_rope(torch.cat(positions), config.block.head_dim, config.rope_theta, config.axial)
        whole = attend_segments([rows * columns for rows, columns in grids])
        local, back_T = whole, None
        if config.window_cells:
            order_M, lengths = window_order(grids, config.merge_size, config.window_cells)
            unit = config.merge_size**2
            order_T = (order_M[:, None] * unit + torch.arange(unit)).flatten().to(device)
            x_TC, rope, back_T = x_TC[order_T], rope.reordered(order_T), order_T.argsort()
            local = attend_segments(lengths)
        deepstack = []
        for layer, block in enumerate(self.blocks):
            x_TC = block.forward(x_TC, whole if layer in config.full_attention_layers else local, rope)
            if layer in config.deepstack_layers:
                deepstack.append(x_TC)
        if config.final_norm_key is not None:
            x_TC = self.parameters.normed(x_TC, "final_norm", config.block.norm, config.block.norm_eps)
        return PackedFeatures(x_TC if back_T is None else x_TC[back_T], tuple(deepstack))
