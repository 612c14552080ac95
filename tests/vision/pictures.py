"""Makes image files for the tests: with Pillow, and PNG chunk by chunk where Pillow cannot write what is wanted."""

import base64
import struct
import zlib
from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]


def noise(height: int, width: int, channels: int = 3, *, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def smooth(height: int, width: int) -> Pixels:
    """Gradients without symmetry, which lossy formats keep closely."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([y * 255 // height, x * 255 // width, (2 * y + x) * 255 // (2 * height + width)], -1).astype(
        np.uint8
    )


def save(image: Image.Image, name: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def data_url(file: bytes, kind: str = "png") -> str:
    """A file as clients send it."""
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    size: tuple[int, int], bits: int, colour: int, rows: list[bytes], *, extra: bytes = b"", late: bytes = b""
) -> bytes:
    """`size` is width, height; `rows` packed samples; `extra` chunks before and `late` chunks after the pixels."""
    head = struct.pack(">IIBBBBB", *size, bits, colour, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    return PNG_MAGIC + chunk(b"IHDR", head) + extra + chunk(b"IDAT", body) + late + chunk(b"IEND", b"")


def png_bomb(side: int) -> bytes:
    """A valid 1-bit PNG of side x side zeros; the compressed stream is one piece repeated."""
    total = (side // 8 + (side % 8 > 0) + 1) * side
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = 1 << 20
    block = squeeze.compress(bytes(piece)) + squeeze.flush(zlib.Z_FULL_FLUSH)
    last = zlib.compressobj(9, zlib.DEFLATED, -15)
    rest = last.compress(bytes(total % piece)) + last.flush()
    body = b"\x78\xda" + block * (total // piece) + rest + struct.pack(">I", (total % 65521) << 16 | 1)
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return PNG_MAGIC + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def exif(orientation: int) -> bytes:
    """An EXIF block with one entry, without the "Exif" header."""
    return b"II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)


PNG_MAGIC = b"\x89PNG\r\n\x1a\n"

FILES: dict[str, bytes] = {
    "png": save(Image.fromarray(noise(41, 67)), "PNG"),
    "png-palette": save(Image.fromarray(noise(41, 67)).quantize(32), "PNG", transparency=3),
    "jpeg": save(Image.fromarray(noise(41, 67)), "JPEG"),
    "jpeg-progressive": save(Image.fromarray(noise(41, 67)), "JPEG", progressive=True),
    "webp": save(Image.fromarray(noise(41, 67)), "WEBP"),
    "webp-lossless": save(Image.fromarray(noise(41, 67, 4)), "WEBP", lossless=True, exact=True),
    "gif": save(Image.fromarray(noise(41, 67)).quantize(256), "GIF"),
    "bmp": save(Image.fromarray(noise(41, 67)), "BMP"),
    "tiff": save(Image.fromarray(noise(41, 67)), "TIFF"),
    "tiff-lzw": save(Image.fromarray(noise(41, 67)), "TIFF", compression="tiff_lzw"),
    "tiff-jpeg": save(Image.fromarray(noise(41, 67)), "TIFF", compression="jpeg"),
    "avif": save(Image.fromarray(noise(41, 67)), "AVIF"),
}
"""One file of each kind, 67 wide and 41 high."""
