"""Test pictures, and what a recipe and the engine together make of one: the numbers that a tower is given."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vision.encoder.inputs import image_input
from vision.encoder.model import ImageInput
from vision.preprocess.common import Recipe
from vision.preprocess.pixtral import Pixtral
from vision.preprocess.qwen2_vl import Qwen2VL
from vision.tower_config import (
    BlockConfig,
    BlockKeys,
    FixedGridConfig,
    FixedGridKeys,
    MergeConfig,
    MergeKeys,
    PackedConfig,
    VisionTowerConfig,
)

SIZES = (
    *((1, 1), (1, 2), (2, 1), (1, 40), (40, 1), (3, 3), (3, 17), (17, 3), (4, 4), (5, 7), (7, 5), (13, 14), (14, 14)),
    *((15, 14), (16, 16), (17, 16), (20, 90), (27, 28), (28, 28), (28, 29), (29, 56), (31, 33), (32, 32), (33, 32)),
    *((40, 30), (41, 83), (48, 48), (50, 49), (55, 57), (56, 56), (56, 112), (57, 57), (60, 300), (63, 64), (64, 64)),
    *((65, 63), (66, 131), (70, 40), (75, 100), (80, 80), (84, 84), (90, 20), (96, 96), (97, 41), (99, 101), (100, 75)),
    *(
        (111, 113),
        (112, 56),
        (112, 112),
        (120, 30),
        (127, 129),
        (128, 64),
        (130, 131),
        (140, 140),
        (150, 50),
        (160, 90),
    ),
    *((181, 179), (200, 200), (224, 224), (240, 135), (300, 60), (333, 111), (336, 336), (401, 399)),
)
"""(height, width)."""


def picture(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """uint8 [height, width, 3]: noise, a gradient, or blocks of flat colour, by the seed."""
    draw = np.random.default_rng(seed)
    if seed % 3 == 0:
        return draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
    rows, cols = np.mgrid[0:height, 0:width]
    channels = [rows * 255 // height, cols * 255 // width, (rows + cols) * 255 // (height + width)]
    gradient = np.stack(channels, axis=-1).astype(np.uint8)
    return gradient if seed % 3 == 1 else (gradient // 64 * 85).astype(np.uint8)


def pictures(sizes: tuple[tuple[int, int], ...] = SIZES) -> Iterator[NDArray[np.uint8]]:
    """One picture a size."""
    for seed, (height, width) in enumerate(sizes):
        yield picture(height, width, seed)


def as_pil(image_HWC: NDArray[np.uint8]) -> Image.Image:
    """What the processors take without guessing which axis is the channel."""
    return Image.fromarray(image_HWC)


KEYS = BlockKeys(layer="{}", norm1="", norm2="", qkv=("",), out="", mlp_in=("",), mlp_out="")
BLOCK = BlockConfig(
    hidden_size=8, intermediate_size=8, num_heads=1, norm="layer", norm_eps=1e-5, activation="gelu", keys=KEYS
)
PACKED = PackedConfig(
    block=BLOCK,
    num_layers=1,
    patch_size=1,
    patch_width=3,
    patch_key="",
    patch_bias=False,
    patch_rank=4,
    merge_size=1,
    rope_theta=1e4,
    layout="pixels",
)
FIXED = FixedGridConfig(
    block=BLOCK,
    keys=FixedGridKeys(patch="", position=""),
    num_layers=1,
    image_size=1,
    patch_size=1,
    num_channels=3,
    patch_bias=False,
    feature_layers=(1,),
    drop_class_token=False,
)
PROJECTOR = MergeConfig(in_size=8, out_size=8, hidden_size=8, keys=MergeKeys(first=""), bias=False)


def tower_of(recipe: Recipe) -> VisionTowerConfig:
    """A tower that takes what the recipe makes; only what tells the order of the numbers means anything."""
    tower: PackedConfig | FixedGridConfig = FIXED
    if isinstance(recipe, Qwen2VL):
        width = 3 * recipe.temporal * recipe.patch**2
        tower = replace(
            PACKED, layout="cells", patch_size=recipe.patch, merge_size=recipe.merge, patch_width=width, patch_rank=5
        )
    elif isinstance(recipe, Pixtral):
        tower = PACKED
    return VisionTowerConfig(family="", tower=tower, projector=PROJECTOR)


def tower_input(recipe: Recipe, image_HWC: NDArray[np.uint8], tower: VisionTowerConfig | None = None) -> ImageInput:
    """What the tower is given for the picture; one after the recipe's kind unless given."""
    layout, tiles_NHWC = recipe.layout(*image_HWC.shape[:2]), recipe.tiles(as_pil(image_HWC))
    assert tiles_NHWC.dtype == np.uint8 and tiles_NHWC.flags.c_contiguous
    assert tiles_NHWC.shape == (layout.tiles, layout.height, layout.width, 3)
    data = torch.frombuffer(bytearray(tiles_NHWC.tobytes()), dtype=torch.uint8)
    return image_input(
        tower or tower_of(recipe),
        torch.from_numpy(recipe.finish.table()),
        data.reshape(tiles_NHWC.shape),
        rows=layout.rows,
        cols=layout.cols,
        image_height=layout.image_height,
        image_width=layout.image_width,
    )


def numbers(
    recipe: Recipe, image_HWC: NDArray[np.uint8], tower: VisionTowerConfig | None = None
) -> NDArray[np.float32]:
    """float32: tiles [N, 3, H, W], or patches [T, K] of the packed towers that take those."""
    found: NDArray[np.float32] = tower_input(recipe, image_HWC, tower).pixels.numpy()
    assert found.dtype == np.float32
    return found
