"""Files that are not what they say: each is refused with a reason, quickly, in little memory, and without a word of
Pillow's; a picture is never shown in part."""

import resource
import struct
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageFile

from tests.vision.pictures import FILES, PNG_MAGIC, chunk, noise, png, png_bomb, save
from vision.errors import CorruptImage, ImageError, ImageTooLarge, UnsupportedImage
from vision.image import decode
from vision.limits import ImageLimits

LIMITS = ImageLimits()


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def attempt(data: bytes) -> Image.Image | ImageError:
    try:
        return decode(data, LIMITS)
    except ImageError as error:
        return error


@pytest.mark.parametrize("name", sorted(FILES))
def test_truncation_at_every_tenth_byte(name: str) -> None:
    data = FILES[name]
    whole = decode(data, LIMITS)
    refused, cuts = 0, [*range(0, len(data) - 20, 10), *range(len(data) - 20, len(data))]
    for cut in cuts:
        found = attempt(data[:cut])
        if isinstance(found, ImageError):
            refused += 1
            assert found.kind in ("corrupt_image", "unsupported_image_format") and 15 < len(str(found)) < 160
        else:
            assert found.tobytes() == whole.tobytes(), cut
    assert refused >= len(cuts) - 4, "a GIF without its trailer or a BMP without its padding shows all its pixels"


@pytest.mark.parametrize("name", sorted(FILES))
def test_flipped_bits_never_give_anything_but_an_image_error(name: str) -> None:
    random = np.random.default_rng(len(name))
    for _ in range(100):
        data = bytearray(FILES[name])
        for at in random.integers(0, min(len(data), 400), 3):
            data[at] ^= 1 << int(random.integers(0, 8))
        found = attempt(bytes(data))
        kinds = ("corrupt_image", "image_too_large", "unsupported_image_format")
        assert not isinstance(found, ImageError) or found.kind in kinds


def test_every_changed_byte_of_a_png_is_noticed() -> None:
    data = FILES["png"]
    for at in range(0, len(data), 101):
        with pytest.raises((CorruptImage, UnsupportedImage)):
            decode(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :], LIMITS)


def test_png_bomb_is_refused_before_it_grows() -> None:
    bomb = png_bomb(65_500)
    assert 400_000 < len(bomb) < 700_000
    before, start = peak_kib(), time.process_time()
    with pytest.raises(ImageTooLarge, match=r"65500 x 65500.*16384 pixels a side"):
        decode(bomb, LIMITS)
    with pytest.raises(ImageTooLarge, match="limit is 12582912 pixels"):
        decode(bomb, ImageLimits(max_image_side=70_000))
    assert time.process_time() - start < 0.1
    assert peak_kib() - before < 10_000


def test_the_makers_bomb_is_a_valid_file() -> None:
    assert decode(png_bomb(2504), LIMITS).getextrema() == ((0, 0),) * 3


def claims(width: int, height: int) -> dict[str, bytes]:
    """Small files that say they are that large."""
    bmp = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 200, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    tiff = b"II*\0" + struct.pack("<IH", 8, 9)
    entries = ((256, width), (257, height), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, height), (279, 9))
    tiff += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries) + bytes(4)
    jpeg = FILES["jpeg"]
    at = jpeg.index(b"\xff\xc0") + 5
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return {
        "png": png((width, height), 8, 6, [b""]),
        "gif": b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + bytes(6) + FILES["gif"][-3000:],
        "bmp": bmp + bytes(200),
        "tiff": tiff,
        "jpeg": jpeg[:at] + struct.pack(">HH", height, width) + jpeg[at + 4 :],
        "webp": b"RIFF" + struct.pack("<I", 500) + b"WEBPVP8X\x0a\0\0\0\x10\0\0\0" + size + bytes(480),
    }


@pytest.mark.parametrize("name", ["png", "bmp", "tiff", "jpeg", "webp"])
@pytest.mark.parametrize(("width", "height"), [(65_500, 65_500), (16_384, 16_384), (1, 30_000), (30_000, 1)])
def test_size_is_checked_before_pixels_in_every_format(name: str, width: int, height: int) -> None:
    before, start = peak_kib(), time.process_time()
    with pytest.raises(ImageTooLarge, match=f"{width} x {height}; the limit is"):
        decode(claims(width, height)[name], LIMITS)
    assert time.process_time() - start < 0.1
    assert peak_kib() - before < 10_000


def test_gif_whose_frame_is_larger_than_its_screen() -> None:
    data = bytearray(FILES["gif"])
    at = data.index(b"\x2c\0\0\0\0" + struct.pack("<HH", 67, 41))
    data[at + 5 : at + 9] = struct.pack("<HH", 65_000, 65_000)
    with pytest.raises(ImageTooLarge):
        decode(bytes(data), LIMITS)


def test_limits_are_met_exactly() -> None:
    image = save(Image.fromarray(noise(10, 20)), "PNG")
    exact = ImageLimits(max_image_bytes=len(image), max_image_pixels=200, max_image_side=20)
    assert decode(image, exact).size == (20, 10)
    for limits, said in (
        (ImageLimits(max_image_bytes=len(image) - 1), f"{len(image)} bytes; the limit is {len(image) - 1}"),
        (ImageLimits(max_image_pixels=199), "10; the limit is 199 pixels"),
        (ImageLimits(max_image_side=19), "10; the limit is 19 pixels a side"),
    ):
        with pytest.raises(ImageTooLarge, match=said):
            decode(image, limits)


def test_webp_counts_twice() -> None:
    """Its decoder takes sixteen bytes a pixel, twice as much as any other."""
    image = save(Image.fromarray(noise(10, 20)), "WEBP")
    assert decode(image, ImageLimits(max_image_pixels=400)).size == (20, 10)
    with pytest.raises(ImageTooLarge, match="20 x 10; the limit is 199 pixels of a WebP file"):
        decode(image, ImageLimits(max_image_pixels=399))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JPEG, PNG"),
        (b"\0" * 100, "not JPEG, PNG"),
        (bytes(range(256)) * 8, "not JPEG, PNG"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', "SVG"),
        (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- --><SVG/>', "SVG"),
        (b"\n <!DOCTYPE html><html></html>", "HTML"),
        (b"<html><body>" + FILES["png"], "HTML"),
        (b"%PDF-1.7\n" + FILES["jpeg"], "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PostScript"),
        (b"\xc5\xd0\xd3\xc6" + bytes(40), "PostScript"),
        (b"PK\x03\x04" + FILES["jpeg"], "not JPEG, PNG"),
        (b"8BPS\0\x01" + bytes(60), "not JPEG, PNG"),
        (b"\0\0\x01\0\x01\0" + FILES["png"], "not JPEG, PNG"),
        (b"P6 2 2 255\n" + bytes(12), "not JPEG, PNG"),
        (b"\xd7\xcd\xc6\x9a" + bytes(60), "not JPEG, PNG"),
        (b"\x28\xb5\x2f\xfd" + bytes(60), "not JPEG, PNG"),
        (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(60), "not JPEG, PNG"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + bytes(60), "not JPEG, PNG"),
        (b"RIFF\x24\0\0\0WAVEfmt " + bytes(60), "not JPEG, PNG"),
        (b"II\xbc\x01" + bytes(60), "not JPEG, PNG"),
    ],
)
def test_other_formats_and_polyglots_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(UnsupportedImage, match=said):
        decode(data, LIMITS)


@pytest.mark.parametrize("magic", [b"\xff\xd8\xff", PNG_MAGIC, b"GIF89a", b"BM", b"II*\0", b"MM\0*", b"II+\0"])
@pytest.mark.parametrize("rest", [b"", b"\0" * 64, b"\xff" * 64, b"<html><script>" * 20, bytes(range(256)) * 20])
def test_a_magic_number_alone_is_no_image(magic: bytes, rest: bytes) -> None:
    with pytest.raises((CorruptImage, ImageTooLarge)):
        decode(magic + rest, LIMITS)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits", "raw", "lzma", "zstd"])
def test_tiff_is_read_with_its_common_compressions_only(compression: str) -> None:
    pixels = noise(40, 60)
    found = attempt(save(Image.fromarray(pixels), "TIFF", compression=compression))
    if compression in ("lzma", "zstd"):
        assert isinstance(found, UnsupportedImage)
    else:
        assert isinstance(found, Image.Image) and np.array_equal(np.asarray(found), pixels)


def test_a_reason_is_given_where_the_decoder_has_none() -> None:
    with pytest.raises(CorruptImage, match="The PNG file is truncated or broken: it cannot be decoded"):
        decode(png((1, 1), 8, 3, [b"\x07"]), LIMITS)


def test_what_follows_an_image_is_not_read() -> None:
    for name in ("png", "jpeg", "gif"):
        behind = decode(FILES[name] + b"PK\x03\x04<script>alert(1)</script>" + bytes(999), LIMITS)
        assert behind.tobytes() == decode(FILES[name], LIMITS).tobytes(), name


def test_work_that_a_file_can_ask_for_is_bounded() -> None:
    chunks = b"".join([chunk(b"junk", b"")] * 70_000)
    scan = FILES["jpeg"].index(b"\xff\xda")
    scans = FILES["jpeg"][:scan] + b"\xff\xda\0\x08\x01\x01\0\0\x3f\0\0" * 41 + FILES["jpeg"][scan:]
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(50_000_000), 1))
    before = peak_kib()
    for data, said in (
        (png((1, 1), 8, 0, [b"\x07"], extra=chunks), "65536 chunks"),
        (scans, "30 scans"),
        (png((1, 1), 8, 0, [b"\x07"], extra=text), "too large"),
    ):
        start = time.process_time()
        with pytest.raises(CorruptImage, match=said):
            decode(data, LIMITS)
        assert time.process_time() - start < 1.5
    assert peak_kib() - before < 80_000


def test_warnings_of_pillow_never_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """TIFF metadata that is truncated, too long or beyond the file; an invalid APNG; broken EXIF; large sizes."""
    tiff = bytearray(FILES["tiff"])
    directory = struct.unpack_from("<I", tiff, 4)[0]
    odd = bytearray(tiff)
    struct.pack_into("<HHII", odd, directory + 2 + 12 * 3, 270, 2, 5000, len(odd) - 100)
    many = bytearray(tiff)
    struct.pack_into("<HHII", many, directory + 2 + 12 * 3, 296, 3, 9, 8)
    apng = png((1, 1), 8, 0, [b"\x07"], extra=chunk(b"acTL", bytes(8)))
    broken = save(
        Image.fromarray(noise(9, 9)), "WEBP", exif=b"Exif\0\0II*\0" + struct.pack("<IHHHII", 8, 9, 270, 2, 999, 9)
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for data in (bytes(odd), bytes(many), apng, broken, bytes(tiff[: directory + 9])):
            attempt(data)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
        for name in ("png", "gif", "webp", "tiff"):
            assert decode(FILES[name], LIMITS).size == (67, 41)
    assert [str(warning.message) for warning in heard] == []


def test_threads_see_what_one_thread_sees() -> None:
    names = sorted(FILES) * 8
    alone = {name: decode(FILES[name], LIMITS).tobytes() for name in FILES}
    settings = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: decode(FILES[name], LIMITS).tobytes(), names))
    assert found == [alone[name] for name in names]
    assert settings == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) == (89_478_485, False)
