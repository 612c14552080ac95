"""From a tower's features to vectors of the language model's width. Called by `encoder/model.py`.

Engine and worker processes. Holds weights, keeps no state.

Legend: B images (tiles), P patches, N vectors, C width of a patch's feature, O width of the language model, m
merge_size, H and W an image's patches, row by row.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate, rms_norm

from vision.encoder.parameters import Parameters
from vision.tower_config import MergeConfig, PoolConfig

SHRINK_ABOVE = 1.1
"""Grids of tiles are shrunk if they are longer than allowed by more than this factor along each side."""


def merge_cells(x_BHWC: Tensor, merge_size: int) -> Tensor:
    """[B, H, W, C] -> [B, H/m x W/m, m x m x C]: neighbouring patches joined, row by row within a square of m x m."""
    batch, rows, columns, width = x_BHWC.shape
    split = x_BHWC.reshape(batch, rows // merge_size, merge_size, columns // merge_size, merge_size, width)
    return split.transpose(2, 3).reshape(batch, -1, merge_size**2 * width)


class MergeProjector:
    """Optional norm, patches joined, one linear layer or two: every projector but Gemma 3's."""

    def __init__(self, config: MergeConfig, name: str, parameters: Parameters) -> None:
        self.config, self.name, self.parameters = config, name, parameters

    def _normed(self, x: Tensor) -> Tensor:
        return self.parameters.normed(x, f"{self.name}.norm", self.config.norm, self.config.norm_eps)

    def forward(self, cells_NmC: Tensor) -> Tensor:
        """[N, m x m, C] -> [N, O]: the patches of each square, row by row."""
        config, has_norm = self.config, self.config.keys.norm is not None
        if has_norm and not config.norm_after_merge:
            cells_NmC = self._normed(cells_NmC)
        merged = cells_NmC.transpose(1, 2).flatten(1) if config.channel_major else cells_NmC.flatten(1)
        if has_norm and config.norm_after_merge:
            merged = self._normed(merged)
        if config.keys.merging is not None:
            merged = self.parameters.linear(merged, f"{self.name}.merging")
        projected = self.parameters.linear(merged, f"{self.name}.first")
        if config.keys.second is None:
            return projected
        return self.parameters.linear(self.parameters.activate(projected, config.activation), f"{self.name}.second")

    def forward_grid(self, x_BHWC: Tensor) -> Tensor:
        """[B, H, W, C] -> [B, N, O]; H and W are multiples of merge_size."""
        merged = merge_cells(x_BHWC, self.config.merge_size)
        cells = merged.reshape(-1, self.config.merge_size**2, x_BHWC.shape[-1])
        return self.forward(cells).reshape(*merged.shape[:2], -1)


class PoolProjector:
    """Average over squares of patches, RMS norm with weight 1 + w, one matrix: Gemma 3."""

    def __init__(self, config: PoolConfig, name: str, parameters: Parameters) -> None:
        self.config, self.name, self.parameters = config, name, parameters
        self.weight_C = 1.0 + parameters.vectors[f"{name}.norm.weight"]

    def forward_grid(self, x_BHWC: Tensor) -> Tensor:
        """[B, H, W, C] -> [B, N, O]; H and W are multiples of pool_size."""
        pooled_BCHW = avg_pool2d(x_BHWC.permute(0, 3, 1, 2), self.config.pool_size)
        pooled_BNC = pooled_BCHW.flatten(2).transpose(1, 2)
        normed_BNC = rms_norm(pooled_BNC, self.weight_C.shape, self.weight_C, self.config.norm_eps)
        return self.parameters.linear(normed_BNC, f"{self.name}.matrix")


def unpadded(x_OHW: Tensor, image_size: tuple[int, int]) -> Tensor:
    """[O, H, W] without the rows or columns that padded an image of this (height, width) to the grid's shape."""
    height, width = image_size
    rows, columns = x_OHW.shape[1:]
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return x_OHW[:, padding : rows - padding]
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return x_OHW[:, :, padding : columns - padding]


def _shrunk(x_OHW: Tensor, side: int, max_tiles: int) -> Tensor:
    _, rows, columns = x_OHW.shape
    ratio = math.sqrt(rows * columns / (max_tiles * side**2))
    if ratio <= SHRINK_ABOVE:
        return x_OHW
    return interpolate(x_OHW[None], [int(rows // ratio), int(columns // ratio)], mode="bilinear")[0]


def pack_tiles(
    tiles_BPO: Tensor,
    tile_grid: tuple[int, int],
    image_size: tuple[int, int],
    newline_O: Tensor,
    max_tiles: int | None,
) -> Tensor:
    """[N, O] of one image: the small copy, then its tiles joined, cropped to the image, each row ended by a newline.

    Tiles are square: the small copy first, then tile_grid (rows, columns) of them row by row; image_size is (height,
    width) in pixels before any resizing. The small copy alone is followed by one newline.
    """
    if len(tiles_BPO) == 1:
        return torch.cat([tiles_BPO[0], newline_O[None]])
    side = math.isqrt(tiles_BPO.shape[1])
    # [rows, columns, H, W, O] -> [O, rows x H, columns x W]
    x = tiles_BPO[1:].reshape(*tile_grid, side, side, -1).permute(4, 0, 2, 1, 3)
    x_OHW = unpadded(x.flatten(3, 4).flatten(1, 2), image_size)
    if max_tiles is not None:
        x_OHW = _shrunk(x_OHW, side, max_tiles)
    newline_OH1 = newline_O[:, None, None].expand(-1, x_OHW.shape[1], 1)
    rows_NO = torch.cat([x_OHW, newline_OH1], dim=-1).flatten(1).T
    return torch.cat([tiles_BPO[0], rows_NO])
