"""A PNG whose compressed pixels end early, in perfect order but for that, is refused; Pillow shows the rest black."""

import struct
import zlib

import numpy as np
import pytest

from tests.vision.pictures import PNG_MAGIC, Pixels, chunk, noise, png
from vision.containers import ADAM7, check_png_pixels
from vision.errors import CorruptImage
from vision.image import decode
from vision.limits import ImageLimits


def samples(pixels_HWC: Pixels, interlaced: bool) -> bytes:
    """What a PNG compresses: rows with their filter type, pass by pass."""
    passes = ADAM7 if interlaced else ((0, 0, 1, 1),)
    parts = [pixels_HWC[top::down, left::across] for left, top, across, down in passes]
    return b"".join(b"\0" + row.tobytes() for part in parts if part.size for row in part)


def file_of(pixels_HWC: Pixels, interlaced: bool, cut: int = 0) -> bytes:
    """Without the last `cut` bytes of its samples."""
    height, width, _ = pixels_HWC.shape
    raw = samples(pixels_HWC, interlaced)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, interlaced)
    body = zlib.compress(raw[: len(raw) - cut])
    return PNG_MAGIC + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (1, 2), (2, 1), (1, 30), (30, 1), (3, 5), (5, 3), (8, 8), (17, 9)]
)
def test_every_cut_is_noticed(height: int, width: int, interlaced: bool) -> None:
    limits = ImageLimits()
    pixels = np.maximum(noise(height, width), 1)
    for whole in (pixels, np.zeros_like(pixels)):
        assert np.array_equal(np.asarray(decode(file_of(whole, interlaced), limits)), whole)
    for cut in range(1, len(samples(pixels, interlaced))):
        with pytest.raises(CorruptImage, match="truncated"):
            decode(file_of(pixels, interlaced, cut), limits)


@pytest.mark.parametrize(("bits", "colour", "row"), [(1, 0, 2), (4, 3, 5), (16, 0, 18), (8, 4, 18), (16, 6, 72)])
def test_bytes_of_a_row_in_every_mode(bits: int, colour: int, row: int) -> None:
    check_png_pixels(png((9, 3), bits, colour, [bytes(row)] * 3))
    with pytest.raises(CorruptImage):
        check_png_pixels(png((9, 3), bits, colour, [bytes(row)] * 2 + [bytes(row - 1)]))
