"""What can be known of an image file from its bytes alone: its format, whether it is whole, and its size where a
decoder would allocate before it tells. Pure functions on bytes.

Called by `image.py` in a worker thread of the API process, before Pillow sees anything.
"""

import re
import struct
import zlib
from collections.abc import Iterator

from vision.errors import CorruptImage, UnsupportedImage

MAX_PNG_CHUNKS = 65_536
MAX_JPEG_SCANS = 30
"""A progressive file has about ten; each further one costs a pass over all pixels however short it is."""

AVIF_BRANDS = (b"avif", b"avis")
HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
)
REFUSED = (
    (re.compile(rb"%PDF"), "PDF"),
    (re.compile(rb"%!|\xc5\xd0\xd3\xc6"), "PostScript"),
    (re.compile(rb"<svg|<\?xml(?=[\s\S]*<svg)", re.IGNORECASE), "SVG"),
    (re.compile(rb"<!doctype html|<html|<head|<body|<script", re.IGNORECASE), "HTML"),
)
"""Named in the message, so that a client sees what it sent."""

PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""Of each pass: first column and row, and steps between columns and rows."""
INFLATED_PIECE = 1 << 18
"""Bytes of pixels that are inflated at once to be counted."""

JPEG_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9


def sniff(data: bytes) -> str:
    """The format by the first bytes: what the client declares is not believed, and what comes later in the file (a
    polyglot) is not looked for. Raises UnsupportedImage."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp":
        size = min(max(int.from_bytes(data[:4], "big"), 16), 256)
        brands = [data[8:12], *(data[at : at + 4] for at in range(16, size, 4))]
        if any(brand in AVIF_BRANDS for brand in brands):
            return "AVIF"
        if any(brand in HEIC_BRANDS for brand in brands):
            return "HEIC"
    for magic, name in MAGIC:
        if data.startswith(magic):
            return name
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    for pattern, name in REFUSED:
        if pattern.match(head):
            raise UnsupportedImage(f"The file is {name}, which is not among the image formats that are read")
    raise UnsupportedImage("The file is not JPEG, PNG, WebP, GIF, AVIF, BMP, TIFF or HEIC")


def check_whole(data: bytes, name: str) -> None:
    """Raises CorruptImage for a file of that format whose end is missing or whose structure is broken, as far as its
    frame tells; the decoder finds the rest."""
    if name == "PNG":
        _check_png(data)
    elif name == "JPEG":
        _check_jpeg(data)
    elif name == "WebP" and int.from_bytes(data[4:8], "little") + 8 > len(data):
        raise CorruptImage("The WebP file is truncated")


def _check_png(data: bytes) -> None:
    """Walks the chunks up to the end. Checksums are the decoder's: of chunks before the pixels, and of the pixels."""
    for _ in _png_chunks(data):
        pass


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, end) of each chunk's content up to IEND. Raises CorruptImage."""
    at = 8
    for _ in range(MAX_PNG_CHUNKS):
        if at + 12 > len(data):
            raise CorruptImage("The PNG file is truncated")
        size, kind = struct.unpack_from(">I4s", data, at)
        at += 12 + size
        if at > len(data):
            raise CorruptImage("The PNG file is truncated")
        if kind == b"IEND":
            return
        yield kind, at - 4 - size, at - 4
    raise CorruptImage(f"The PNG file has more than {MAX_PNG_CHUNKS} chunks, which is the limit")


def check_png_pixels(data: bytes) -> None:
    """Raises CorruptImage for a PNG that has been decoded and holds fewer pixels than it says: Pillow leaves the rest
    black. It counts them, which takes as long as decoding."""
    width, height, bits, colour, _, _, interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    missing = 0
    for left, top, across, down in ADAM7 if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        missing += rows * (1 + (columns * bits * PNG_CHANNELS[colour] + 7) // 8) if columns > 0 else 0
    inflate = zlib.decompressobj()
    for kind, start, end in _png_chunks(data):
        rest = data[start:end] if kind == b"IDAT" else b""
        while rest and missing > 0 and not inflate.eof:
            missing -= len(inflate.decompress(rest, INFLATED_PIECE))
            rest = inflate.unconsumed_tail
    if missing > 0:
        missing -= len(inflate.flush())
    if missing > 0:
        raise CorruptImage("The PNG file is truncated: its pixels end before the picture does")


def _check_jpeg(data: bytes) -> None:
    """Walks the markers up to the end of the (first) image. Entropy-coded data holds FF only before 00 and RSTn."""
    at, scans = 2, 0
    while (marker := JPEG_MARKER.search(data, at)) is not None:
        kind = marker[1][0]
        if kind == END_OF_IMAGE:
            return
        at = marker.end()
        if kind == 0x01:
            continue
        scans += kind == START_OF_SCAN
        if scans > MAX_JPEG_SCANS:
            raise CorruptImage(f"The JPEG file has more than {MAX_JPEG_SCANS} scans, which is the limit")
        at += int.from_bytes(data[at : at + 2], "big")
    raise CorruptImage("The JPEG file is truncated: it has no end-of-image marker")


def webp_size(data: bytes) -> tuple[int, int]:
    """Width and height in the header. The decoder of WebP allocates the canvas when it opens a file, so this comes
    first. Raises CorruptImage."""
    kind, body = data[12:16], data[20:30]
    if len(body) == 10 and kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if len(body) == 10 and kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if len(body) == 10 and kind == b"VP8 ":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    raise CorruptImage("The WebP file has no image header")
