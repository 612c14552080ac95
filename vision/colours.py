"""From any mode in which Pillow holds pixels to 8-bit RGB on white. Works band by band, so that beside the decoded
image and the result only a few megabytes are needed, whatever the conversion.

Called by `image.py` in a worker thread of the API process.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from PIL import Image, TiffImagePlugin

Bytes = npt.NDArray[np.uint8]
Convert = Callable[[Image.Image], Image.Image]

BAND_PIXELS = 1 << 18
WIDE_GREY = ("I;16", "I;16B", "I;16L", "I;16N")
KEY_SCALE = {"L;2": 85, "L;4": 17}
"""Pillow stretches grey of 2 and 4 bits to 8, but not the key of a PNG's tRNS chunk."""
PREMULTIPLIED = {"RGBa": "RGBA", "La": "LA"}
TIFF_BITS, TIFF_PHOTOMETRIC, MIN_IS_WHITE = 258, 262, 0


def raw_mode(image: Image.Image) -> str:
    """How the samples lie in the file ("L;4", "RGB;16B", ...); known only until the pixels are loaded."""
    tiles = image.tile if hasattr(image, "tile") else ()
    arguments = tiles[0][3] if tiles else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


def fill_on_white(image: Image.Image, raw: str, target: Bytes) -> None:
    """Writes a loaded image into `target` (H, W, 3), transparency composited on white. `raw` is its `raw_mode` from
    before loading. 16-bit samples keep their high byte; 32-bit samples have no agreed range: see `_stretched`."""
    _mend_key(image, raw)
    convert = _converter(image)
    top = 0
    for band in _bands(image):
        rgb = np.asarray(convert(band))
        target[top : top + len(rgb)] = rgb
        top += len(rgb)


def _bands(image: Image.Image) -> Iterator[Image.Image]:
    width, height = image.size
    rows = max(BAND_PIXELS // width, 1)
    for top in range(0, height, rows):
        yield image.crop((0, top, width, min(top + rows, height)))


def _converter(image: Image.Image) -> Convert:
    """What brings each band to RGB."""
    if image.mode in WIDE_GREY:
        return _wide_grey(image)
    if image.mode in ("I", "F"):
        return _stretched(image)
    return _on_white if image.has_transparency_data else _opaque


def _opaque(band: Image.Image) -> Image.Image:
    return band if band.mode == "RGB" else band.convert("RGB")


def _on_white(band: Image.Image) -> Image.Image:
    if band.mode in PREMULTIPLIED:
        band = band.convert(PREMULTIPLIED[band.mode])
    layer = band.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _mend_key(image: Image.Image, raw: str) -> None:
    """Brings a PNG's transparent colour to the scale of its pixels, which Pillow has brought to 8 bits."""
    key = image.info.get("transparency")
    if isinstance(key, int) and raw in KEY_SCALE:
        image.info["transparency"] = min(key * KEY_SCALE[raw], 255)
    elif isinstance(key, tuple) and raw == "RGB;16B":
        image.info["transparency"] = tuple(sample >> 8 for sample in key)


def _wide_grey(image: Image.Image) -> Convert:
    """For 9- to 16-bit grey, of which a PNG may declare one value transparent and a TIFF zero to be white."""
    bits, inverted = 16, False
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        bits = int(image.tag_v2.get(TIFF_BITS, (16,))[0])
        inverted = image.tag_v2.get(TIFF_PHOTOMETRIC) == MIN_IS_WHITE
    key = image.info.get("transparency")

    def convert(band: Image.Image) -> Image.Image:
        wide = np.asarray(band).astype(np.uint16)
        grey = (wide >> (bits - 8)).astype(np.uint8)
        if inverted:
            np.subtract(255, grey, out=grey)
        if isinstance(key, int):
            grey[wide == key] = 255
        return Image.fromarray(grey).convert("RGB")

    return convert


def _stretched(image: Image.Image) -> Convert:
    """For grey of 32-bit integers or floats. The range is guessed from all values: 0..1 (floats), 0..255 and 0..65535
    (integers) mean what they usually do; anything else is stretched from its least to its greatest value. What is not
    finite counts as 0."""
    is_float = image.mode == "F"
    ranges = [(values.min(), values.max()) for values in map(_finite, _bands(image))]
    low, high = float(min(low for low, _ in ranges)), float(max(high for _, high in ranges))
    base, span = low, high - low
    if low >= 0 and is_float and high <= 1:
        base, span = 0.0, 1.0
    elif low >= 0 and high <= 255:
        base, span = 0.0, 255.0
    elif low >= 0 and not is_float and high <= 65535:
        return lambda band: Image.fromarray((np.asarray(band) >> 8).astype(np.uint8)).convert("RGB")

    def convert(band: Image.Image) -> Image.Image:
        grey = np.rint((_finite(band) - base) / (span or 1.0) * 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")

    return convert


def _finite(band: Image.Image) -> npt.NDArray[np.float64]:
    return np.nan_to_num(np.asarray(band).astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
