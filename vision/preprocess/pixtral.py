"""The image's own aspect, sides rounded up to whole merged patches: Pixtral and Mistral 3.

Called by the worker pool of the API process (`tiles`), by prompt building (`layout`) and by `vision/config.py`
(`read`). Equals PixtralImageProcessorPil, less the zeros that it adds to make a batch.
"""

import math
from dataclasses import dataclass

from PIL import Image

from vision.preprocess.common import Finish, Layout, UInt8, check_size, sides, stacked
from vision.preprocess.values import CLIP_MEAN, CLIP_STD, Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixtral:
    """Shrinks to fit `most_height` x `most_width`, never enlarges; `unit` is patch size times spatial merge."""

    finish: Finish
    most_height: int
    most_width: int
    unit: int

    def layout(self, image_height: int, image_width: int) -> Layout:
        """One image of height x width, multiples of `unit`. Raises ImageShapeError."""
        height, width = image_height, image_width
        ratio = max(height / self.most_height, width / self.most_width)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        height, width = (((side - 1) // self.unit + 1) * self.unit for side in (height, width))
        check_size(image_height, image_width, height, width)
        return Layout(image_height=image_height, image_width=image_width, height=height, width=width)

    def tiles(self, image: Image.Image) -> UInt8:
        """uint8 [1, H, W, 3]. Raises ImageShapeError."""
        layout = self.layout(*sides(image))
        return stacked([self.finish.resize(image, layout.height, layout.width)])


def read(values: Values, unit: int) -> Pixtral:
    """PixtralImageProcessor, with the unit that its processor sets. Raises PreprocessorError."""
    size = values.section("size")
    if size.has("longest_edge") or not size.data:
        most = (size.integer("longest_edge", 1024),) * 2
    else:
        most = values.square_or_pair("size", (1024, 1024))
    finish = values.finish(Image.Resampling.BICUBIC, CLIP_MEAN, CLIP_STD)
    return Pixtral(finish=finish, most_height=most[0], most_width=most[1], unit=unit)
