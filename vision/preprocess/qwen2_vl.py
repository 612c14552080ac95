"""Packed patches at the image's own resolution: Qwen2-VL, Qwen2.5-VL, Qwen3-VL.

Called by the worker pool of the API process (`tiles`), by prompt building (`layout`) and by `vision/config.py`
(`read`). Equals Qwen2VLImageProcessorPil.
"""

import math
from dataclasses import dataclass

from PIL import Image

from vision.preprocess.common import Finish, ImageShapeError, Layout, UInt8, check_size, sides, stacked
from vision.preprocess.values import CLIP_MEAN, CLIP_STD, Values

MAX_ASPECT = 200
"""How many times longer than wide an image may be, a rule of the model family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VL:
    """Both sides become multiples of patch * merge, the area stays between `min_pixels` and `max_pixels`."""

    finish: Finish
    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int

    def layout(self, image_height: int, image_width: int) -> Layout:
        """One packed image of height x width; its grid has height / patch rows. Raises ImageShapeError."""
        if max(image_height, image_width) > MAX_ASPECT * min(image_height, image_width):
            raise ImageShapeError(
                f"an image of {image_width} x {image_height} pixels is more than {MAX_ASPECT} times longer than wide"
            )
        height, width = self._smart_size(image_height, image_width)
        check_size(image_height, image_width, height, width)
        return Layout(image_height=image_height, image_width=image_width, height=height, width=width)

    def tiles(self, image: Image.Image) -> UInt8:
        """uint8 [1, H, W, 3]. Raises ImageShapeError."""
        layout = self.layout(*sides(image))
        return stacked([self.finish.resize(image, layout.height, layout.width)])

    def _smart_size(self, height: int, width: int) -> tuple[int, int]:
        unit = self.patch * self.merge
        new_height, new_width = round(height / unit) * unit, round(width / unit) * unit
        if new_height * new_width > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            new_height = max(unit, math.floor(height / beta / unit) * unit)
            new_width = max(unit, math.floor(width / beta / unit) * unit)
        elif new_height * new_width < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * beta / unit) * unit
            new_width = math.ceil(width * beta / unit) * unit
        return new_height, new_width


def read(values: Values) -> Qwen2VL:
    """Qwen2VLImageProcessor, with any spelling of the limits: the old names in `size`, or beside it, where they win.
    Raises PreprocessorError."""
    size, most = values.edges("size"), 1 << 26
    least = size.integer("shortest_edge", size.integer("min_pixels", 56 * 56, most=most), most=most)
    greatest = size.integer("longest_edge", size.integer("max_pixels", 28 * 28 * 1280, most=most), most=most)
    return Qwen2VL(
        finish=values.finish(Image.Resampling.BICUBIC, CLIP_MEAN, CLIP_STD),
        patch=values.integer("patch_size", 14),
        merge=values.integer("merge_size", 2),
        temporal=values.integer("temporal_patch_size", 2),
        min_pixels=values.integer("min_pixels", least, most=most),
        max_pixels=values.integer("max_pixels", greatest, most=most),
    )
