"""Tiles and a whole view after three Lanczos resizes: Idefics3 and SmolVLM.

Called by the worker pool of the API process (`tiles`), by prompt building (`layout`) and by `vision/config.py`
(`read`). Equals Idefics3ImageProcessorPil and SmolVLMImageProcessorPil. Every tile is a full square, so that the pixel
mask of those processors is one everywhere and is not made.
"""

import math
from dataclasses import dataclass

from PIL import Image

from vision.preprocess.common import Finish, Layout, UInt8, check_size, cut, sides, stacked
from vision.preprocess.values import HALF, Values

MAX_LONGEST_EDGE = 4096
"""The processors scale no image beyond it, whatever `size` asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3:
    """Scales the longest edge to `longest_edge`, both sides up to multiples of `tile`, cuts, adds the whole view."""

    finish: Finish
    longest_edge: int
    tile: int
    split: bool

    def layout(self, image_height: int, image_width: int) -> Layout:
        """rows x cols tiles and the whole view, or that alone (0 x 0). Raises ImageShapeError."""
        height, width = self._first_size(image_height, image_width)
        check_size(image_height, image_width, height, width)
        rows = cols = 0
        if self.split:
            height, width = self._multiple(height, width)
            check_size(image_height, image_width, height, width)
            if max(height, width) > self.tile:
                rows, cols = height // self.tile, width // self.tile
        return Layout(
            image_height=image_height,
            image_width=image_width,
            height=self.tile,
            width=self.tile,
            tiles=rows * cols + 1,
            rows=rows,
            cols=cols,
        )

    def tiles(self, image: Image.Image) -> UInt8:
        """uint8 [N, tile, tile, 3]: the tiles in reading order, the whole view last. Raises ImageShapeError."""
        image = self.finish.resize(image, *self._first_size(*sides(image)))
        if self.split:
            image = self.finish.resize(image, *self._multiple(*sides(image)))
        whole = self.finish.resize(image, self.tile, self.tile)
        is_cut = self.split and max(image.size) > self.tile
        return stacked([*(cut(image, self.tile, self.tile) if is_cut else []), whole])

    def _first_size(self, height: int, width: int) -> tuple[int, int]:
        """The longest edge as configured, the other one truncated and then made even, neither above the bound."""
        aspect, most = width / height, self.longest_edge
        if width >= height:
            width, height = most, int(most / aspect)
            height = max(height + height % 2, 1)
        else:
            height, width = most, int(most * aspect)
            width = max(width + width % 2, 1)
        aspect = width / height
        if max(height, width) <= MAX_LONGEST_EDGE:
            return height, width
        if width >= height:
            return max(int(MAX_LONGEST_EDGE / aspect), 1), MAX_LONGEST_EDGE
        return MAX_LONGEST_EDGE, max(int(MAX_LONGEST_EDGE * aspect), 1)

    def _multiple(self, height: int, width: int) -> tuple[int, int]:
        """Both sides up to multiples of the tile, the shorter one from the aspect after the longer one grew."""
        aspect = width / height
        if width >= height:
            width = math.ceil(width / self.tile) * self.tile
            return math.ceil(int(width / aspect) / self.tile) * self.tile, width
        height = math.ceil(height / self.tile) * self.tile
        return height, math.ceil(int(height * aspect) / self.tile) * self.tile


def read(values: Values) -> Idefics3:
    """Idefics3ImageProcessor and SmolVLMImageProcessor. Raises PreprocessorError."""
    return Idefics3(
        finish=values.finish(Image.Resampling.LANCZOS, HALF, HALF),
        longest_edge=values.edges("size").integer("longest_edge", 4 * 364),
        tile=values.edges("max_image_size").integer("longest_edge", 364),
        split=values.flag("do_image_splitting", True),
    )
