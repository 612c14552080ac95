"""Tiles of the grid whose aspect is nearest, and a thumbnail: InternVL (GotOcr2's processor).

Called by the worker pool of the API process (`tiles`), by prompt building (`layout`) and by `vision/config.py`
(`read`). Equals GotOcr2ImageProcessorPil.
"""

from dataclasses import dataclass

from PIL import Image

from vision.preprocess.common import Finish, Layout, UInt8, check_size, cut, sides, stacked
from vision.preprocess.values import CLIP_MEAN, CLIP_STD, Values

MAX_TILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVL:
    """Tiles of `height` x `width`, `min_tiles` to `max_tiles` of them; a single tile goes without a thumbnail."""

    finish: Finish
    height: int
    width: int
    min_tiles: int
    max_tiles: int

    def layout(self, image_height: int, image_width: int) -> Layout:
        """rows x cols tiles and the thumbnail, or 0 x 0 and one view."""
        rows, cols = self._grid(image_height, image_width)
        check_size(image_height, image_width, rows * self.height, cols * self.width)
        is_cut = rows * cols > 1
        return Layout(
            image_height=image_height,
            image_width=image_width,
            height=self.height,
            width=self.width,
            tiles=rows * cols + is_cut,
            rows=rows * is_cut,
            cols=cols * is_cut,
        )

    def tiles(self, image: Image.Image) -> UInt8:
        """uint8 [N, H, W, 3]: the tiles in reading order, the thumbnail last."""
        rows, cols = self._grid(*sides(image))
        canvas = self.finish.resize(image, rows * self.height, cols * self.width)
        tiles = cut(canvas, self.height, self.width)
        if len(tiles) > 1:
            tiles.append(self.finish.resize(image, self.height, self.width))
        return stacked(tiles)

    def _grid(self, image_height: int, image_width: int) -> tuple[int, int]:
        """(rows, cols). Among grids of one aspect the larger, as long as the image fills more than half of it."""
        if self.max_tiles == 1:
            return 1, 1
        counts = range(1, self.max_tiles + 1)
        grids = [(rows, cols) for cols in counts for rows in counts if self.min_tiles <= rows * cols <= self.max_tiles]
        aspect, area = image_width / image_height, image_width * image_height
        best, best_difference = (1, 1), float("inf")
        for rows, cols in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            difference = abs(aspect - cols / rows)
            fills = area > 0.5 * self.height * self.width * rows * cols
            if difference < best_difference or (difference == best_difference and fills):
                best, best_difference = (rows, cols), difference
        return best


def read(values: Values) -> InternVL:
    """GotOcr2ImageProcessor with `crop_to_patches`, which InternVL's processor turns on whatever the file says. Raises
    PreprocessorError."""
    height, width = values.square_or_pair("size", (384, 384))
    most = values.integer("max_patches", 12, most=MAX_TILES)
    least = values.integer("min_patches", 1, most=MAX_TILES)
    if most > 1 and least > most:
        values.fail("min_patches", f"at most max_patches, {most}")
    return InternVL(
        finish=values.finish(Image.Resampling.BICUBIC, CLIP_MEAN, CLIP_STD),
        height=height,
        width=width,
        min_tiles=min(least, most),
        max_tiles=most,
    )
