"""What the preprocessing recipes share: types, the layout of an image, Pillow resizing, exact normalisation.

Called by the recipes beside it, in the API process' worker pool. numpy and Pillow only; every function is pure.
Shape suffixes: N tiles, C channels (3), H height, W width, V values of a byte (256).

Images are Pillow's, of mode RGB, until they are tiles: a copy to numpy and back takes as long as a resize, and as much
memory as the image. Every recipe cuts and resizes in uint8, as the Pillow processors of transformers do (each resize
rounds). What becomes of the 256 possible values in the end is a table, which the engine looks them up in
(`vision/encoder/inputs.py`): bytes are a quarter of what would have to be sent. It holds exactly what those processors
compute: a float64 product rounded to float32, then a float32 difference and quotient.
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
"""Pixels of the square that an image is padded to before it is resized. It is made band by band, so this bounds the
work, not the memory."""
BAND_PIXELS = 1 << 18


class ImageShapeError(ImageError):
    """The image is too narrow or too long for the model's recipe; the message gives its size, and what helps."""

    kind = "image_shape"

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; send it in pieces, or with a margin along its long sides")


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

    def tiles(self, image: Image.Image) -> UInt8:
        """uint8 [N, H, W, 3], contiguous, N, H and W as the layout says. Raises ImageShapeError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The filter of every resize, and what becomes of the bytes in the end: (value * scale - mean) / std."""

    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def resize(self, image: Image.Image, height: int, width: int) -> Image.Image:
        """The image itself where it has that size. Raises ImageShapeError."""
        check_size(image.height, image.width, height, width)
        if image.size == (width, height):
            return image
        return image.resize((width, height), resample=Image.Resampling(self.resample))

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


def sides(image: Image.Image) -> tuple[int, int]:
    """(height, width) of an image."""
    return image.height, image.width


def target_size(height: int, width: int, target: Target) -> tuple[int, int]:
    """(height, width) after scaling to `target`; the longer side is truncated, as transformers does."""
    if isinstance(target, tuple):
        return target
    short, long = sorted((height, width))
    longest = int(target * long / short)
    return (longest, target) if width <= height else (target, longest)


def center_crop(image: Image.Image, height: int, width: int) -> Image.Image:
    """height x width from the middle; where the image is smaller, black surrounds it."""
    top, left = (image.height - height) // 2, (image.width - width) // 2
    return image.crop((left, top, left + width, top + height))


def resize_square(image: Image.Image, mean: Sequence[float], finish: Finish, height: int, width: int) -> Image.Image:
    """height x width of the square of the longer side that has the image in the middle and the mean colour (values 0 to
    1) around it. Raises ImageShapeError.

    Where both sides change alike, Pillow resizes rows first, rounds, and then columns; done so here, only a band of the
    square is ever in memory, and every pixel is that of the whole square resized. (Where they do not, its order depends
    on the sizes; no known model asks for that.)
    """
    side = max(image.size)
    check_size(image.height, image.width, side, side, most=MAX_SQUARE_PIXELS)
    red, green, blue = (int(value * 255) for value in mean)
    if height != width:
        square = Image.new("RGB", (side, side), (red, green, blue))
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return finish.resize(square, height, width)
    narrow = Image.new("RGB", (width, side), (red, green, blue))
    if image.width == side:
        narrow.paste(finish.resize(image, image.height, width), (0, (side - image.height) // 2))
        return finish.resize(narrow, height, width)
    rows = max(BAND_PIXELS // side, 1)
    for top in range(0, side, rows):
        bottom = min(top + rows, side)
        band = Image.new("RGB", (side, bottom - top), (red, green, blue))
        band.paste(image.crop((0, top, image.width, bottom)), ((side - image.width) // 2, 0))
        narrow.paste(finish.resize(band, bottom - top, width), (0, top))
    return finish.resize(narrow, height, width)


def cut(image: Image.Image, height: int, width: int) -> list[Image.Image]:
    """Tiles in reading order; the image's sides are multiples of the tile's."""
    tops, lefts = range(0, image.height, height), range(0, image.width, width)
    return [image.crop((left, top, left + width, top + height)) for top in tops for left in lefts]


def stacked(tiles: Sequence[Image.Image]) -> UInt8:
    """uint8 [N, H, W, 3], contiguous, of tiles of one size."""
    if len(tiles) == 1:
        return np.asarray(tiles[0])[None]
    tiles_NHWC = np.empty((len(tiles), *sides(tiles[0]), 3), np.uint8)
    for tile, target_HWC in zip(tiles, tiles_NHWC, strict=True):
        target_HWC[:] = np.asarray(tile)
    return tiles_NHWC
