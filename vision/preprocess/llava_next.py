"""Any resolution: LLaVA-NeXT and LLaVA-OneVision, a whole view followed by the tiles of the best fitting grid.

Called by the worker pool of the API process (`tiles`), by prompt building (`layout`) and by `vision/config.py`
(`read_*`). Equals LlavaNextImageProcessorPil and LlavaOnevisionImageProcessorPil, less the tiles of zeros that they add
to make a batch.
"""

import math
from dataclasses import dataclass

from PIL import Image

from vision.preprocess.clip import OneView, read_crop, read_target
from vision.preprocess.common import (
    Finish,
    Layout,
    Target,
    UInt8,
    center_crop,
    check_size,
    cut,
    sides,
    stacked,
    target_size,
)
from vision.preprocess.values import CLIP_MEAN, CLIP_STD, Values

NEXT_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
ONEVISION_PINPOINTS = tuple((384 * rows, 384 * cols) for rows in range(1, 7) for cols in range(1, 7))
MAX_PINPOINTS, MAX_TILES = 256, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyResolution:
    """Fits the image into the best of `pinpoints` (height, width), pads it with zeros, cuts tiles of `tile`; scales
    tiles and the whole view to `target` once more and cuts `crop` out of each."""

    finish: Finish
    pinpoints: tuple[tuple[int, int], ...]
    tile: int
    target: Target
    crop: tuple[int, int] | None

    def layout(self, image_height: int, image_width: int) -> Layout:
        """The whole view and rows x cols tiles. Raises ImageShapeError."""
        best_height, best_width = best_pinpoint(image_height, image_width, self.pinpoints)
        rows, cols = best_height // self.tile, best_width // self.tile
        check_size(image_height, image_width, best_height, best_width)
        height, width = target_size(self.tile, self.tile, self.target) if self.crop is None else self.crop
        return Layout(
            image_height=image_height,
            image_width=image_width,
            height=height,
            width=width,
            tiles=1 + rows * cols,
            rows=rows,
            cols=cols,
        )

    def tiles(self, image: Image.Image) -> UInt8:
        """uint8 [N, H, W, 3]: the whole view, then the tiles in reading order. Raises ImageShapeError."""
        whole = self.target if isinstance(self.target, tuple) else (self.target, self.target)
        tiles = [self.finish.resize(image, *whole), *cut(self._fitted(image), self.tile, self.tile)]
        tiles = [self.finish.resize(tile, *target_size(*sides(tile), self.target)) for tile in tiles]
        if self.crop is not None:
            tiles = [center_crop(tile, *self.crop) for tile in tiles]
        return stacked(tiles)

    def one_of_many(self) -> OneView:
        """The recipe of LLaVA-OneVision for an image that is not the only one: a square view of it, no tiles."""
        return OneView(finish=self.finish, target=self.target, crop=self.crop, square=True)

    def _fitted(self, image: Image.Image) -> Image.Image:
        height, width = sides(image)
        best_height, best_width = best_pinpoint(height, width, self.pinpoints)
        scale_h, scale_w = best_height / height, best_width / width
        if scale_w < scale_h:
            size = min(math.ceil(height * scale_w), best_height), best_width
        else:
            size = best_height, min(math.ceil(width * scale_h), best_width)
        canvas = Image.new("RGB", (best_width, best_height))
        canvas.paste(self.finish.resize(image, *size), ((best_width - size[1]) // 2, (best_height - size[0]) // 2))
        return canvas


def best_pinpoint(height: int, width: int, pinpoints: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The resolution that keeps most of the image's pixels and, among equals, wastes least; the first of those."""

    def merit(pinpoint: tuple[int, int]) -> tuple[int, int]:
        scale = min(pinpoint[1] / width, pinpoint[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - pinpoint[0] * pinpoint[1]

    return max(pinpoints, key=merit)


def _read_pinpoints(values: Values, default: tuple[tuple[int, int], ...], tile: int) -> tuple[tuple[int, int], ...]:
    key = "image_grid_pinpoints"
    given = values.data[key] if values.has(key) else default
    wanted = f"1 to {MAX_PINPOINTS} pairs of multiples of {tile}, at most {MAX_TILES} tiles each"
    if not isinstance(given, list | tuple) or not 1 <= len(given) <= MAX_PINPOINTS:
        values.fail(key, wanted)
    for pair in given:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(side, int) for side in pair):
            values.fail(key, wanted)
        if min(pair) < tile or pair[0] % tile or pair[1] % tile or pair[0] * pair[1] > MAX_TILES * tile * tile:
            values.fail(key, wanted)
    return tuple((pair[0], pair[1]) for pair in given)


def read_llava_next(values: Values) -> AnyResolution:
    """LlavaNextImageProcessor. Raises PreprocessorError."""
    target = read_target(values, 224)
    crop = read_crop(values, (224, 224), when_missing=True)
    tile = values.square_or_pair("crop_size", (224, 224))[0]
    return AnyResolution(
        finish=values.finish(Image.Resampling.BICUBIC, CLIP_MEAN, CLIP_STD),
        pinpoints=_read_pinpoints(values, NEXT_PINPOINTS, tile),
        tile=tile,
        target=target,
        crop=crop,
    )


def read_llava_onevision(values: Values) -> AnyResolution:
    """LlavaOnevisionImageProcessor: no crop unless asked for. Raises PreprocessorError."""
    target = read_target(values, 384) if values.has("size") else (384, 384)
    side = target[0] if isinstance(target, tuple) else target
    tile = values.square_or_pair("crop_size", (side, side))[0]
    return AnyResolution(
        finish=values.finish(Image.Resampling.BICUBIC, CLIP_MEAN, CLIP_STD),
        pinpoints=_read_pinpoints(values, ONEVISION_PINPOINTS, tile),
        tile=tile,
        target=target,
        crop=read_crop(values, None, when_missing=False),
    )
