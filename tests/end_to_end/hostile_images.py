"""Image files and URLs that are odd, broken or malicious, with what each must come to.

`ODD` files are right and must be answered like their picture as a plain PNG; `BROKEN` files and `urls()` must be
refused.
"""

import struct
import zlib
from collections.abc import Iterator
from io import BytesIO

import numpy as np
from PIL import Image

from tests.vision.pictures import FILES, PNG_MAGIC, chunk, exif, noise, png, png_bomb, save
from tests.vision.test_image_hostile import claims
from tests.vision.test_source_policy import LOOPBACK

HEIGHT, WIDTH = 30, 40
GREY = noise(HEIGHT, WIDTH, 1, seed=1)[..., 0]
RGB = noise(HEIGHT, WIDTH, 3, seed=2)
ALPHA = noise(HEIGHT, WIDTH, 1, seed=3)[..., 0]
PALETTE = Image.fromarray(RGB).quantize(32)
FRAMES = [Image.fromarray(noise(HEIGHT, WIDTH, 3, seed=seed)) for seed in (4, 5, 6)]
FLAT = [Image.fromarray(np.full((HEIGHT, WIDTH, 3), (200, 30, 90), np.uint8)), *FRAMES[1:]]
"""An animation whose first frame no palette changes."""
SHORT = {
    "PNG": save(Image.fromarray(noise(12, 16)), "PNG"),
    "JPEG": save(Image.fromarray(noise(12, 16)), "JPEG"),
    "WEBP": save(Image.fromarray(noise(12, 16)), "WEBP"),
    "GIF": save(Image.fromarray(noise(12, 16)).quantize(64), "GIF"),
    "BMP": save(Image.fromarray(noise(12, 16)), "BMP"),
    "TIFF": save(Image.fromarray(noise(12, 16)), "TIFF", compression="tiff_lzw"),
    "AVIF": save(Image.fromarray(noise(12, 16)), "AVIF"),
}
"""To be cut at every tenth byte."""

Picture = Image.Image


def on_white(rgb: np.ndarray, alpha: np.ndarray) -> Picture:
    """Composited as Pillow does it, of an image without any transparency of its own."""
    layer = Image.fromarray(np.dstack([rgb, alpha]))
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def reopened(file: bytes) -> Picture:
    """What a lossy file shows."""
    with Image.open(BytesIO(file)) as image:
        return image.convert("RGB")


def _grey(pixels: np.ndarray) -> Picture:
    return Image.fromarray(pixels).convert("RGB")


def _odd() -> Iterator[tuple[str, bytes, Picture]]:
    plain, size = Image.fromarray(RGB), (WIDTH, HEIGHT)
    tail = b"PK\x05\x06" + bytes(18) + b"<html><script>alert(1)</script></html>"
    wide = (GREY.astype(np.uint16) << 8) | 77
    yield "16-bit grey PNG", save(Image.fromarray(wide), "PNG"), _grey(GREY)
    rows = [((line.astype(">u2") << 8) + 9).astype(">u2").tobytes() for line in RGB]
    yield "16-bit RGB PNG", png(size, 16, 2, rows), plain
    bits = GREY > 127
    yield (
        "1-bit PNG",
        png(size, 1, 0, [np.packbits(line).tobytes() for line in bits]),
        _grey(bits.astype(np.uint8) * 255),
    )
    yield "grey PNG", save(Image.fromarray(GREY), "PNG"), _grey(GREY)
    yield "palette PNG", save(PALETTE, "PNG"), PALETTE.convert("RGB")
    yield (
        "palette PNG with a transparent colour",
        save(PALETTE, "PNG", transparency=3),
        on_white(np.asarray(PALETTE.convert("RGB")), np.where(np.asarray(PALETTE) == 3, 0, 255).astype(np.uint8)),
    )
    yield "RGBA PNG", save(Image.fromarray(np.dstack([RGB, ALPHA])), "PNG"), on_white(RGB, ALPHA)
    grey_alpha = [np.stack([line, alpha], -1).tobytes() for line, alpha in zip(GREY, ALPHA, strict=True)]
    yield "LA PNG", png(size, 8, 4, grey_alpha), on_white(np.dstack([GREY] * 3), ALPHA)
    key = chunk(b"tRNS", struct.pack(">HHH", *RGB[4, 5]))
    clear = np.where((RGB[4, 5] == RGB).all(-1), 0, 255).astype(np.uint8)
    yield "RGB PNG with a key", png(size, 8, 2, [line.tobytes() for line in RGB], extra=key), on_white(RGB, clear)
    options = {"save_all": True, "append_images": FLAT[1:], "duration": 40}
    yield "animated GIF", save(FLAT[0], "GIF", **options), FLAT[0]
    yield "animated WebP", save(FLAT[0], "WEBP", lossless=True, **options), FLAT[0]
    yield "animated PNG", save(FLAT[0], "PNG", **options), FLAT[0]
    yield "TIFF of three pages", save(FLAT[0], "TIFF", save_all=True, append_images=FLAT[1:]), FLAT[0]
    for name, options in (("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("AVIF", {})):
        file = save(plain, name, **options)
        yield f"{name} {options}", file, reopened(file)
    for name, file in (
        ("CMYK JPEG", save(plain.convert("CMYK"), "JPEG")),
        ("grey JPEG", save(Image.fromarray(GREY), "JPEG")),
        ("JPEG and a page", save(plain, "JPEG") + tail),
    ):
        yield name, file, reopened(file)
    yield "CMYK TIFF", save(plain.convert("CMYK"), "TIFF"), plain.convert("CMYK").convert("RGB")
    yield "PNG and an archive", save(plain, "PNG") + tail, plain
    yield "PNG with a script in a comment", _commented(tail), plain
    yield "GIF and a page", save(PALETTE, "GIF") + tail, PALETTE.convert("RGB")
    for name, options in (("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "packbits"})):
        yield f"{name} {options}", save(plain, name, **options), plain
    turned = plain.transpose(Image.Transpose.ROTATE_90)
    yield "turned PNG", save(turned, "PNG", exif=b"Exif\0\0" + exif(6)), plain
    for edge in ((1, 1), (1, 3000), (3000, 1)):
        thin = Image.fromarray(noise(*edge, seed=9))
        yield f"{edge} PNG", save(thin, "PNG"), thin


def _commented(comment: bytes) -> bytes:
    rows = [line.tobytes() for line in RGB]
    return png((WIDTH, HEIGHT), 8, 2, rows, extra=chunk(b"tEXt", b"Comment\0" + comment))


ODD = {name: (file, picture) for name, file, picture in _odd()}


def _other_formats() -> Iterator[tuple[str, bytes]]:
    image = FILES["png"]
    yield "nothing much", b"\0" * 100
    yield "SVG that reads a file", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    yield "SVG with entities", b'<?xml version="1.0"?><!DOCTYPE s [<!ENTITY a "aaaa">]><svg>&a;</svg>'
    yield "page", b"<!DOCTYPE html><html><body>x</body></html>"
    yield "page that holds a PNG", b"<html>" + image
    yield "PDF that holds a JPEG", b"%PDF-1.7\n" + FILES["jpeg"]
    yield "PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    yield "archive before a PNG", b"PK\x03\x04" + image
    yield "icon", b"\0\0\x01\0\x01\0" + image
    yield "Photoshop", b"8BPS\0\x01" + bytes(60)
    yield "portable pixmap", b"P6 2 2 255\n" + bytes(12)
    yield "metafile", b"\xd7\xcd\xc6\x9a" + bytes(60)
    yield "JPEG 2000", b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(60)
    yield "film", b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + bytes(60)
    yield "HEIC without a picture", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(60)
    yield "AVIF without a picture", b"\0\0\0\x18ftypavif\0\0\0\0mif1avif" + bytes(60)
    yield "sound", b"RIFF\x24\0\0\0WAVEfmt " + bytes(60)
    yield "program", b"\x7fELF" + bytes(60)
    yield "pickle", b"\x80\x04cposix\nsystem\n."


def _broken() -> Iterator[tuple[str, bytes]]:
    yield from _other_formats()
    for size in ((65_500, 65_500), (1, 30_000), (4096, 3073)):
        for name, file in claims(*size).items():
            yield f"{name} that says it has {size}", file
    yield "bomb of 65500", png_bomb(65_500)
    yield "bomb of 16384", png_bomb(16_384)
    yield (
        "text bomb",
        png((1, 1), 8, 0, [b"\x07"], extra=chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(40_000_000), 1))),
    )
    yield (
        "profile bomb",
        png((1, 1), 8, 0, [b"\x07"], extra=chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(10**7), 1)) * 2),
    )
    yield "70 000 chunks", png((1, 1), 8, 0, [b"\x07"], extra=chunk(b"junk", b"") * 70_000)
    yield "pixels that end early", png((400, 400), 8, 2, [bytes([7]) * 1200] * 20)
    scan = FILES["jpeg"].index(b"\xff\xda")
    yield "41 scans", FILES["jpeg"][:scan] + b"\xff\xda\0\x08\x01\x01\0\0\x3f\0\0" * 41 + FILES["jpeg"][scan:]
    for magic in (b"\xff\xd8\xff", PNG_MAGIC, b"GIF89a", b"BM", b"II*\0", b"MM\0*", b"II+\0", b"RIFF\xff\0\0\0WEBP"):
        yield f"{magic!r} and ones", magic + b"\xff" * 64
        yield f"{magic!r} and numbers", magic + bytes(range(256)) * 20
    yield "TIFF that is its own next page", b"II*\0" + struct.pack("<IHI", 8, 0, 8)
    for compression in ("lzma", "zstd"):
        yield f"{compression} TIFF", save(Image.fromarray(RGB), "TIFF", compression=compression)
    gif = bytearray(FILES["gif"])
    at = gif.index(b"\x2c\0\0\0\0" + struct.pack("<HH", 67, 41))
    gif[at + 5 : at + 9] = struct.pack("<HH", 65_000, 65_000)
    yield "GIF whose frame is larger than its screen", bytes(gif)
    yield "too many bytes", save(Image.fromarray(RGB), "PNG") + bytes(20 << 20)


BROKEN = dict(_broken())


def urls(port: int) -> Iterator[str]:
    """Everything but an image from a public host; a canary listens on `port`."""
    for host in LOOPBACK:
        for scheme in ("http", "https"):
            yield f"{scheme}://{host}:{port}/canary.png"
    yield from (f"http://127.0.0.1:{port}#@img.test/", f"http://img.test\\@127.0.0.1:{port}/", f"//127.0.0.1:{port}/x")
    yield from ("file:///etc/passwd", "FILE:/etc/passwd", "file://localhost/etc/passwd", "/etc/passwd", "../x.png")
    yield from ("ftp://img.test/a", "gopher://127.0.0.1/", "javascript:alert(1)", "blob:https://img.test/1")
    yield from ("http://", "http:", "http://[::1", "https://img.test:99999/", "http://u:p@img.test/", " ", "x" * 99_999)
    yield from ("data:", "data:,x", "data:image/png", "data:image/png;base64", "data:image/png;base64,")
    yield from ("data:image/png,x", "data:image/png;base64,%%%%", "data:text/html;base64,PGI+", "data:;base64,====")
