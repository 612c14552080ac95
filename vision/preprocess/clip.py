"""One square view: CLIP, LLaVA's padded variant, SigLIP and Gemma 3.

Called by the worker pool of the API process (`tiles`), by prompt building (`layout`) and by `vision/config.py`
(`read_*`). Equals CLIPImageProcessorPil, LlavaImageProcessorPil, SiglipImageProcessorPil and Gemma3ImageProcessorPil.
"""

from dataclasses import dataclass

from PIL import Image

from vision.preprocess.common import (
    MAX_SQUARE_PIXELS,
    Finish,
    Layout,
    Target,
    UInt8,
    center_crop,
    check_size,
    resize_square,
    sides,
    stacked,
    target_size,
)
from vision.preprocess.values import CLIP_MEAN, CLIP_STD, HALF, Values


@dataclass(frozen=True, slots=True, kw_only=True)
class OneView:
    """Pads to a square of the mean colour where `square` says so, scales to `target`, cuts `crop` from the middle."""

    finish: Finish
    target: Target
    crop: tuple[int, int] | None = None
    square: bool = False

    def layout(self, image_height: int, image_width: int) -> Layout:
        """Always one tile of the same size. Raises ImageShapeError for a line that would be blown up to gigabytes."""
        height, width = image_height, image_width
        if self.square:
            height = width = max(image_height, image_width)
            check_size(image_height, image_width, height, width, most=MAX_SQUARE_PIXELS)
        height, width = target_size(height, width, self.target)
        check_size(image_height, image_width, height, width)
        if self.crop is not None:
            height, width = self.crop
        return Layout(image_height=image_height, image_width=image_width, height=height, width=width)

    def tiles(self, image: Image.Image) -> UInt8:
        """uint8 [1, H, W, 3]. Raises ImageShapeError."""
        side = max(image.size)
        if self.square:
            height, width = target_size(side, side, self.target)
            image = resize_square(image, self.finish.mean, self.finish, height, width)
        else:
            image = self.finish.resize(image, *target_size(*sides(image), self.target))
        if self.crop is not None:
            image = center_crop(image, *self.crop)
        return stacked([image])


def read_target(values: Values, default: int) -> Target:
    """`size` of the processors that take an integer as the shortest edge."""
    if not values.has("size") or isinstance(values.data["size"], int):
        return values.integer("size", default)
    size = values.section("size") if not isinstance(values.data["size"], list | tuple) else None
    if size is not None and size.has("shortest_edge"):
        if size.has("longest_edge"):
            values.fail("size", "a shortest_edge alone, or height and width")
        return size.integer("shortest_edge", default)
    return values.square_or_pair("size", (default, default))


def read_crop(values: Values, default: tuple[int, int] | None, *, when_missing: bool) -> tuple[int, int] | None:
    """`crop_size`, if `do_center_crop` asks for it."""
    if not values.flag("do_center_crop", when_missing):
        return None
    if default is None and not values.has("crop_size"):
        values.fail("crop_size", "given, as do_center_crop is")
    return values.square_or_pair("crop_size", default or (1, 1))


def read_clip(values: Values, *, square: bool = False) -> OneView:
    """CLIPImageProcessor. Raises PreprocessorError; also if images would come out in different sizes."""
    target = read_target(values, 224)
    crop = read_crop(values, (224, 224), when_missing=True)
    if crop is None and not isinstance(target, tuple) and not square:
        values.fail("do_center_crop", "true, where size is a shortest_edge")
    return OneView(
        finish=values.finish(Image.Resampling.BICUBIC, CLIP_MEAN, CLIP_STD), target=target, crop=crop, square=square
    )


def read_llava(values: Values) -> OneView:
    """LlavaImageProcessor: CLIP's, padded to a square first if `do_pad` says so."""
    return read_clip(values, square=values.flag("do_pad", False))


def _read_exact(values: Values, resample: Image.Resampling) -> OneView:
    if not isinstance(values.data.get("size", {}), dict):
        values.fail("size", "an object with height and width")
    target = values.square_or_pair("size", (224, 224))
    return OneView(finish=values.finish(resample, HALF, HALF), target=target)


def read_siglip(values: Values) -> OneView:
    """SiglipImageProcessor: scaled to height x width whatever the aspect."""
    return _read_exact(values, Image.Resampling.BICUBIC)


def read_gemma3(values: Values) -> OneView:
    """Gemma3ImageProcessor without pan and scan, which Gemma 3's processor turns off whatever the file says."""
    return _read_exact(values, Image.Resampling.BILINEAR)
