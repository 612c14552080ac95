"""From the bytes of a processed image to what its tower takes: colours normalised, patches in the tower's order.

Called by `model_runtime/images.py` before `ImageEncoder.encode`, in the engine and worker processes. The API process
has cut and resized the image (`vision/preprocess`); it sends bytes, a quarter of the size, and what is left is a
look-up in a table of 256 values a channel and a permutation, both exact: no number depends on the device or on what
else is encoded.

Legend: N tiles, H and W their sides in pixels, C 3 channels, V 256 values, T patches, K numbers in a patch.
"""

import torch
from torch import Tensor

from vision.encoder.model import ImageInput
from vision.tower_config import PackedConfig, VisionTowerConfig


def image_input(
    config: VisionTowerConfig,
    table_CV: Tensor,
    tiles_NHWC: Tensor,
    *,
    rows: int,
    cols: int,
    image_height: int,
    image_width: int,
) -> ImageInput:
    """One image, on the device of its tiles; pixels are float32.

    `table_CV` is `Finish.table()` of the recipe (float32 [3, 256]), `tiles_NHWC` what its `tiles` gave (uint8). The
    grid of tiles, `rows` x `cols`, and the size before any resizing are those of its `Layout`.
    """
    pixels_NCHW = normalised(table_CV, tiles_NHWC)
    if isinstance(config.tower, PackedConfig):
        return _packed(config.tower, pixels_NCHW)
    if config.tiles is None:
        return ImageInput(pixels=pixels_NCHW)
    tile_grid = (rows, cols) if rows * cols else None
    return ImageInput(pixels=pixels_NCHW, tile_grid=tile_grid, size=(image_height, image_width))


def normalised(table_CV: Tensor, tiles_NHWC: Tensor) -> Tensor:
    """uint8 [N, H, W, C] -> float32 [N, C, H, W]: each byte's entry in its channel's row of the table."""
    count, height, width, channels = tiles_NHWC.shape
    pixels_CNHW = torch.empty(channels, count, height, width, device=tiles_NHWC.device)
    for channel in range(channels):
        values = tiles_NHWC[..., channel].int().flatten()
        torch.index_select(table_CV[channel], 0, values, out=pixels_CNHW[channel].view(-1))
    return pixels_CNHW.transpose(0, 1)


def _packed(tower: PackedConfig, pixels_NCHW: Tensor) -> ImageInput:
    """One whole image of a packed tower."""
    count, channels, height, width = pixels_NCHW.shape
    assert count == 1, f"a packed image is one tile, not {count}"
    if tower.layout == "pixels":
        return ImageInput(pixels=pixels_NCHW)
    patch, merge = tower.patch_size, tower.merge_size if tower.layout == "cells" else 1
    rows, cols = height // patch, width // patch
    assert (rows * patch, cols * patch) == (height, width), f"{height} x {width} pixels are no whole patches"
    assert rows % merge == 0 and cols % merge == 0, f"{rows} x {cols} patches are no whole cells"
    frames = tower.patch_width // (channels * patch**2)
    cells = pixels_NCHW.reshape(channels, rows // merge, merge, patch, cols // merge, merge, patch)
    # (cell row, cell column, row and column in the cell), then (channel, frame, row and column in the patch)
    ordered = cells.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5).expand(-1, -1, -1, -1, -1, frames, -1, -1)
    return ImageInput(pixels=ordered.reshape(rows * cols, tower.patch_width), grid=(rows, cols))
