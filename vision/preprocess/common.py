"""What the preprocessing recipes share: types, the layout of an image, Pillow resizing, exact normalisation.

Called by the recipes beside it, in the API process' worker pool. numpy and Pillow only; every function is pure.
Shape suffixes: N tiles, C channels (3), H height, W width, V values of a byte (256).

Every recipe cuts and resizes in uint8, as the Pillow processors of transformers do (each resize rounds). What becomes
of the 256 possible values in the end is a table, which the engine looks them up in (`vision/encoder/inputs.py`): bytes
are a quarter of what would have to be sent. It holds exactly what those processors compute: a float64 product rounded
to float32, then a float32 difference and quotient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vision.errors import ImageError

UInt8 = NDArray[np.uint8]
Float = NDArray[np.float32]

MAX_RESIZED_PIXELS = 1 << 24
"""Pixels of a resized image (4096 x 4096): recipes that scale the shortest edge would make gigabytes of a line."""

MAX_SQUARE_PIXELS = 1 << 26
"""Pixels of an image that is padded to a square before it is resized: room for a photograph of 40 megapixels."""


class ImageShapeError(ImageError):
    """The image is too narrow or too long for the model's recipe; the message gives its size."""

    kind = "image_shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a recipe makes of an image, from its size alone. All numbers are pixels or counts of tiles.

    `tiles` arrays of `height` x `width` reach the tower; `rows` x `cols` of them are the cut image, a whole view may
    come with them. An image that is not cut has 1 tile and 0 x 0 rows and columns (1 x 1 in the any-resolution recipes,
    whose grid may hold a single tile beside the whole view).
    """

    image_height: int
    image_width: int
    height: int
    width: int
    tiles: int = 1
    rows: int = 0
    cols: int = 0


class Recipe(Protocol):
    """A model family's way from RGB to what its tower takes."""

    @property
    def finish(self) -> "Finish":
        """The same for every image of a checkpoint."""
        ...

    def layout(self, image_height: int, image_width: int) -> Layout:
        """Sizes alone. Raises ImageShapeError for an image that the recipe cannot take."""
        ...

    def tiles(self, image_HWC: UInt8) -> UInt8:
        """uint8 [N, H, W, 3], contiguous, N, H and W as the layout says. Raises ImageShapeError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The filter of every resize, and what becomes of the bytes in the end: (value * scale - mean) / std."""

    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def resize(self, image_HWC: UInt8, height: int, width: int) -> UInt8:
        """uint8 [height, width, 3]; the image itself where it has that size. Raises ImageShapeError."""
        before_height, before_width = image_HWC.shape[:2]
        check_size(before_height, before_width, height, width)
        if (before_height, before_width) == (height, width):
            return image_HWC
        resized = Image.fromarray(image_HWC).resize((width, height), resample=Image.Resampling(self.resample))
        return np.asarray(resized)

    def table(self) -> Float:
        """float32 [3, 256]: what each byte becomes in each channel."""
        scaled_V = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        mean_C1, std_C1 = (np.array(values, np.float32)[:, None] for values in (self.mean, self.std))
        table_CV: Float = (scaled_V - mean_C1) / std_C1
        return table_CV


Target = int | tuple[int, int]
"""The size to scale to: the shortest edge, the other following, or exactly (height, width)."""


def check_size(image_height: int, image_width: int, height: int, width: int, *, most: int = MAX_RESIZED_PIXELS) -> None:
    """Raises ImageShapeError if a side would vanish or the new image would have more than `most` pixels."""
    if height < 1 or width < 1 or height * width > most:
        raise ImageShapeError(
            f"an image of {image_width} x {image_height} pixels would be resized to {width} x {height} for this model, "
            f"which is {'nothing' if height < 1 or width < 1 else f'more than {most} pixels'}"
        )


def sides(image_HWC: UInt8) -> tuple[int, int]:
    """(height, width) of an image."""
    return image_HWC.shape[0], image_HWC.shape[1]


def target_size(height: int, width: int, target: Target) -> tuple[int, int]:
    """(height, width) after scaling to `target`; the longer side is truncated, as transformers does."""
    if isinstance(target, tuple):
        return target
    short, long = sorted((height, width))
    longest = int(target * long / short)
    return (longest, target) if width <= height else (target, longest)


def center_crop(image_HWC: UInt8, height: int, width: int) -> UInt8:
    """uint8 [height, width, 3] from the middle; where the image is smaller, zeros surround it."""
    before_height, before_width = image_HWC.shape[:2]
    canvas_height, canvas_width = max(height, before_height), max(width, before_width)
    pad_y, pad_x = (canvas_height - before_height + 1) // 2, (canvas_width - before_width + 1) // 2
    top, left = (before_height - height) // 2 + pad_y, (before_width - width) // 2 + pad_x
    if (canvas_height, canvas_width) != (before_height, before_width):
        canvas_HWC = np.zeros((canvas_height, canvas_width, 3), np.uint8)
        canvas_HWC[pad_y : pad_y + before_height, pad_x : pad_x + before_width] = image_HWC
        image_HWC = canvas_HWC
    return image_HWC[top : top + height, left : left + width]


def pad_to_square(image_HWC: UInt8, mean: Sequence[float]) -> UInt8:
    """uint8 [S, S, 3]: the image in the middle of a square of its longer side, in the mean colour (values 0 to 1)."""
    height, width = image_HWC.shape[:2]
    side = max(height, width)
    check_size(height, width, side, side, most=MAX_SQUARE_PIXELS)
    square_HWC = np.empty((side, side, 3), np.uint8)
    square_HWC[:] = [int(value * 255) for value in mean]
    top, left = (side - height) // 2, (side - width) // 2
    square_HWC[top : top + height, left : left + width] = image_HWC
    return square_HWC


def cut(image_HWC: UInt8, height: int, width: int) -> list[UInt8]:
    """Tiles uint8 [height, width, 3] in reading order; the image's sides are multiples of the tile's."""
    tops, lefts = range(0, image_HWC.shape[0], height), range(0, image_HWC.shape[1], width)
    return [image_HWC[top : top + height, left : left + width] for top in tops for left in lefts]
