"""From any mode in which Pillow holds pixels to 8-bit RGB on white. Pure functions on images.

Called by `image.py` in a worker thread of the API process.
"""

import numpy as np
import numpy.typing as npt
from PIL import Image, TiffImagePlugin

Array = npt.NDArray[np.generic]

WIDE_GREY = ("I;16", "I;16B", "I;16L", "I;16N")
KEY_SCALE = {"L;2": 85, "L;4": 17}
"""Pillow stretches grey of 2 and 4 bits to 8, but not the key of a PNG's tRNS chunk."""
TIFF_BITS, TIFF_PHOTOMETRIC, MIN_IS_WHITE = 258, 262, 0


def raw_mode(image: Image.Image) -> str:
    """How the samples lie in the file ("L;4", "RGB;16B", ...); known only until the pixels are loaded."""
    tiles = image.tile if hasattr(image, "tile") else ()
    arguments = tiles[0][3] if tiles else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


def on_white(image: Image.Image, raw: str) -> Image.Image:
    """A loaded image as RGB, transparency composited on white. `raw` is its `raw_mode` from before loading.

    16-bit samples keep their high byte. 32-bit integers and floats have no agreed range: see `_stretch`.
    """
    if image.mode in WIDE_GREY:
        return Image.fromarray(_wide_grey(image)).convert("RGB")
    if image.mode in ("I", "F"):
        return Image.fromarray(_stretch(np.asarray(image))).convert("RGB")
    _mend_key(image, raw)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    premultiplied = {"RGBa": "RGBA", "La": "LA"}
    if image.mode in premultiplied:
        image = image.convert(premultiplied[image.mode])
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _mend_key(image: Image.Image, raw: str) -> None:
    """Brings a PNG's transparent colour to the scale of its pixels, which Pillow has brought to 8 bits."""
    key = image.info.get("transparency")
    if isinstance(key, int) and raw in KEY_SCALE:
        image.info["transparency"] = min(key * KEY_SCALE[raw], 255)
    elif isinstance(key, tuple) and raw == "RGB;16B":
        image.info["transparency"] = tuple(sample >> 8 for sample in key)


def _wide_grey(image: Image.Image) -> npt.NDArray[np.uint8]:
    """(H, W) from 9- to 16-bit grey."""
    wide = np.asarray(image).astype(np.uint16)
    bits, inverted = 16, False
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        bits = int(image.tag_v2.get(TIFF_BITS, (16,))[0])
        inverted = image.tag_v2.get(TIFF_PHOTOMETRIC) == MIN_IS_WHITE
    grey = (wide >> (bits - 8)).astype(np.uint8)
    if inverted:
        grey = np.asarray(255 - grey, dtype=np.uint8)
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey[wide == key] = 255
    return grey


def _stretch(samples: Array) -> npt.NDArray[np.uint8]:
    """(H, W) grey from 32-bit integers or floats. The range is guessed from the values: 0..1 (floats), 0..255 and
    0..65535 (integers) mean what they usually do; anything else is stretched from its least to its greatest value. What
    is not finite counts as 0."""
    values = np.nan_to_num(samples.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    is_float = samples.dtype.kind == "f"
    if low >= 0 and is_float and high <= 1:
        values = values * 255
    elif low >= 0 and not is_float and 255 < high <= 65535:
        values = np.floor(values / 256)
    elif low < 0 or high > 255:
        values = (values - low) / max(high - low, 1e-300) * 255
    return np.rint(values).astype(np.uint8)
