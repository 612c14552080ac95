"""Test pictures, and the comparison of a recipe with a Pillow processor of transformers."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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
