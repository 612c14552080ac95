"""From the bytes of an image file to verified RGB: a format of the allow-list, within the limits, whole, upright.

Owns decoding. Called by `server/images.py` in worker threads of the API process; safe in many at once, as no setting of
Pillow is changed.
The plugin of the sniffed format is used directly: `Image.open` would try others, warn about sizes, and depends on what
has been registered. Transparency lies on white, the first frame of an animation counts, EXIF orientation is applied.
Colour profiles are not, as the reference processors do not either.
"""

import re
import struct
import warnings
import zlib
from collections.abc import Callable
from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from vision.colours import fill_on_white, raw_mode
from vision.containers import check_png_pixels, check_whole, sniff, webp_size
from vision.errors import CorruptImage, ImageTooLarge, UnsupportedImage
from vision.limits import ImageLimits

PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WebP": WebPImageFile,
    "GIF": GifImageFile,
    "AVIF": AvifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
DECODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,
    struct.error,
    zlib.error,
)
"""What Pillow's plugins raise on broken files. They parse in Python, so it is nearly everything."""

TIFF_COMPRESSION = 259
TIFF_COMPRESSIONS = (1, 2, 3, 4, 5, 6, 7, 8, 32773, 32946)
"""None, CCITT, LZW, JPEG, deflate, PackBits. The rest (LZMA, Zstandard, WebP, ...) is rare, and each is one more
decoder that strangers could feed."""

ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Orientation -> what makes the stored picture upright."""

COSTS = {"WebP": 2}
"""How many times as much memory a pixel takes as in other formats, where it is at most eight bytes (ten in AVIF and
HEIC): Pillow's decoder for WebP makes four copies with four bytes each."""

PILLOW_MODULES = r"PIL\."
IGNORED_WARNINGS = ("ignore", None, Warning, re.compile(PILLOW_MODULES), 0)


def admit_all(pixels: int) -> None:
    """For callers that decode one image at a time."""


def decode(data: bytes, limits: ImageLimits, admit: Callable[[int], None] = admit_all) -> Image.Image:
    """The picture that the file shows, of mode RGB and loaded. Bytes, side and pixels are checked before any pixel is
    decoded; then `admit` is called with their number, in units of about eight bytes of memory, and may wait until there
    are so many. The result keeps four bytes of each pixel.

    Raises ImageTooLarge, UnsupportedImage, CorruptImage.
    """
    if len(data) > limits.max_image_bytes:
        raise ImageTooLarge(f"The image file has {len(data)} bytes; the limit is {limits.max_image_bytes}")
    name = sniff(data)
    plugin = _plugin(name)
    if name == "WebP":
        _check_size(webp_size(data), name, limits)
    _ignore_warnings_of_pillow()
    try:
        image, orientation = _loaded(plugin, data, name, limits, admit)
        return image.transpose(TURNS[orientation]) if orientation in TURNS else image
    except Image.DecompressionBombError as error:
        raise ImageTooLarge("The image has more pixels than the decoder allows") from error
    except DECODE_ERRORS as error:
        raise CorruptImage(
            f"The {name} file is truncated or broken: {str(error)[:80] or 'it cannot be decoded'}"
        ) from error


def _loaded(
    plugin: type[ImageFile.ImageFile], data: bytes, name: str, limits: ImageLimits, admit: Callable[[int], None]
) -> tuple[Image.Image, int]:
    """The first frame as stored, and its orientation. A function of its own, as the next one, so that what a step was
    made from is gone before the step after it."""
    pixels, orientation = _read(plugin, data, name, limits, admit)
    return (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)), orientation


def _read(
    plugin: type[ImageFile.ImageFile], data: bytes, name: str, limits: ImageLimits, admit: Callable[[int], None]
) -> tuple[Image.Image | npt.NDArray[np.uint8], int]:
    with plugin(BytesIO(data)) as image:
        _check_size(image.size, name, limits)
        _check_compression(image)
        check_whole(data, name)
        admit(image.width * image.height * COSTS.get(name, 1))
        raw = raw_mode(image)
        image.load()
        if name == "PNG" and _may_be_cut(image):
            check_png_pixels(data)
        # TIFF's plugin turns its image itself
        orientation = 1 if isinstance(image, TiffImageFile) else _orientation(image)
        return (
            image if image.mode == "RGB" and not image.has_transparency_data else _on_white(image, raw)
        ), orientation


def _may_be_cut(image: Image.Image) -> bool:
    """Whether one of the last two rows is blank, as are those that Pillow has found no pixels for: one of them is the
    last in the file, interlaced or not, unless there is but one row."""
    last = [(0, row, image.width, row + 1) for row in range(max(image.height - 2, 0), image.height)]
    return image.height == 1 or any(image.crop(box).getbbox(alpha_only=False) is None for box in last)


def _plugin(name: str) -> type[ImageFile.ImageFile]:
    if name != "HEIC":
        return PLUGINS[name]
    try:
        from pillow_heif import HeifImageFile
    except ImportError as error:
        raise UnsupportedImage("The file is HEIC, which this server is not installed to read") from error
    plugin: type[ImageFile.ImageFile] = HeifImageFile
    return plugin


def _check_size(size: tuple[int, int], name: str, limits: ImageLimits) -> None:
    width, height = size
    if max(size) > limits.max_image_side:
        raise ImageTooLarge(f"The image is {width} x {height}; the limit is {limits.max_image_side} pixels a side")
    cost = COSTS.get(name, 1)
    if width * height * cost > limits.max_image_pixels:
        kind = f" of a {name} file" if cost > 1 else ""
        raise ImageTooLarge(
            f"The image is {width} x {height}; the limit is {limits.max_image_pixels // cost} pixels{kind}"
        )


def _check_compression(image: ImageFile.ImageFile) -> None:
    if isinstance(image, TiffImageFile):
        number = image.tag_v2.get(TIFF_COMPRESSION, 1)
        if number not in TIFF_COMPRESSIONS:
            raise UnsupportedImage(f"The TIFF file is compressed in a way that is not read: method {number}")


def _on_white(image: ImageFile.ImageFile, raw: str) -> npt.NDArray[np.uint8]:
    rgb_HWC = np.empty((image.height, image.width, 3), np.uint8)
    fill_on_white(image, raw, rgb_HWC)
    return rgb_HWC


def _orientation(image: Image.Image) -> int:
    """1 to 8; 1 when there is none or the metadata can't be read, which is no reason to refuse good pixels."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except DECODE_ERRORS:
        return 1
    return value if isinstance(value, int) else 1


def _ignore_warnings_of_pillow() -> None:
    """Pillow warns about odd metadata of files that strangers send; that is no news for the server's log. Python has
    one list of filters for all threads, so this adds to it, once and for Pillow's own modules only; a context manager
    would restore the list under the feet of other threads."""
    if IGNORED_WARNINGS not in warnings.filters:
        warnings.filterwarnings("ignore", module=PILLOW_MODULES)
