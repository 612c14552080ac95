"""The image's own aspect, shrunk to a number of patches and filled up with black to whole merged patches: Kimi K2.5 and
Kimi-VL.

Called by the worker pool of the API process (`tiles`), by prompt building (`layout`) and by `vision/config.py`
(`read_k25`, `read_vl`). Sizes equal those of Kimi_K25ImageProcessor of transformers, which knows torchvision only;
pixels are resized with Pillow, as the models' publisher does.
"""

import math
from dataclasses import dataclass

from PIL import Image

from vision.preprocess.common import Finish, Layout, UInt8, check_size, sides, stacked
from vision.preprocess.values import CLIP_MEAN, CLIP_STD, HALF, Values

MAX_PATCHES = 1 << 16
"""Patches of an image that a configuration may ask for."""
VL_SIDE = 511
"""Patches of the longest side that Kimi-VL takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kimi:
    """Shrinks to about `max_patches` patches and at most `max_side` of them along a side, never enlarges; then zeros on
    the right and below make the sides multiples of patch * merge, which may take a row and a column of patches more."""

    finish: Finish
    patch: int
    merge: int
    max_patches: int
    max_side: int

    def layout(self, image_height: int, image_width: int) -> Layout:
        """One packed image of height x width; its grid has height / patch rows. Raises ImageShapeError."""
        unit = self.patch * self.merge
        height, width = (-(-side // unit) * unit for side in self._shrunk(image_height, image_width))
        check_size(image_height, image_width, height, width)
        return Layout(image_height=image_height, image_width=image_width, height=height, width=width)

    def tiles(self, image: Image.Image) -> UInt8:
        """uint8 [1, H, W, 3]. Raises ImageShapeError."""
        layout = self.layout(*sides(image))
        canvas = Image.new("RGB", (layout.width, layout.height))
        canvas.paste(self.finish.resize(image, *self._shrunk(*sides(image))), (0, 0))
        return stacked([canvas])

    def _shrunk(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) before the zeros."""
        patches = max(1, height // self.patch) * max(1, width // self.patch)
        most = self.max_side * self.patch
        scale = min(1.0, math.sqrt(self.max_patches / patches), most / height, most / width)
        return min(max(1, int(height * scale)), most), min(max(1, int(width * scale)), most)


def read_vl(values: Values) -> Kimi:
    """KimiVLImageProcessor, which only its publisher has. It refuses an image that is as long as 512 patches, where the
    rotations of its tower end; here that is shrunk to the longest that it takes. Raises PreprocessorError."""
    if not values.flag("pad_input", False):
        values.fail("pad_input", "true")
    merge, columns = values.square_or_pair("merge_kernel_size", (2, 2))
    if merge != columns:
        values.fail("merge_kernel_size", "a square")
    return Kimi(
        finish=values.finish(Image.Resampling.BICUBIC, CLIP_MEAN, CLIP_STD),
        patch=values.integer("patch_size", 14),
        merge=merge,
        max_patches=values.integer("in_token_limit", 4096, most=MAX_PATCHES),
        max_side=VL_SIDE // merge * merge,
    )


def read_k25(values: Values) -> Kimi:
    """Kimi_K25ImageProcessor, or the publisher's own file, which has an object `media_proc_cfg`. Raises
    PreprocessorError."""
    size, published = values.section("size"), values.section("media_proc_cfg")
    if published.has("fixed_output_tokens"):
        published.fail("fixed_output_tokens", "null")
    side = size.integer("max_height", 512)
    if size.integer("max_width", side) != side:
        size.fail("max_width", f"{side}, the same as max_height")
    both = Values({**values.data, **published.data})
    max_patches = values.integer("max_patches", 16384, most=MAX_PATCHES)
    return Kimi(
        finish=both.finish(Image.Resampling.BICUBIC, HALF, HALF),
        patch=both.integer("patch_size", 14),
        merge=published.integer("merge_kernel_size", values.integer("merge_size", 2)),
        max_patches=published.integer("in_patch_limit", max_patches, most=MAX_PATCHES),
        max_side=published.integer("patch_limit_on_one_side", side),
    )
