"""Decoding good files: every format, mode and orientation gives the pixels that a viewer on white paper shows."""

import struct
import sys
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from tests.vision.pictures import FILES, PNG_MAGIC, Pixels, chunk, exif, noise, png, save, smooth
from vision import colours
from vision.errors import ImageTooLarge, UnsupportedImage
from vision.image import decode
from vision.limits import ImageLimits

LIMITS = ImageLimits()

TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


def rgb(data: bytes) -> Pixels:
    image = decode(data, LIMITS)
    assert image.mode == "RGB"
    return np.asarray(image)


def composed(colour: Pixels, alpha: Pixels) -> Pixels:
    """The definition: colour over white."""
    share = alpha[..., None].astype(np.float64) / 255
    return np.rint(colour * share + 255 * (1 - share)).astype(np.uint8)


def near(found: Pixels, wanted: Pixels, tolerance: int) -> bool:
    same_shape = found.shape == wanted.shape
    return same_shape and int(np.abs(found.astype(int) - wanted.astype(int)).max()) <= tolerance


@pytest.mark.parametrize("name", ["PNG", "WEBP", "BMP", "TIFF"])
def test_lossless_formats_keep_every_pixel(name: str) -> None:
    pixels = noise(41, 67)
    assert np.array_equal(
        rgb(save(Image.fromarray(pixels), name, **({"lossless": True} if name == "WEBP" else {}))), pixels
    )


@pytest.mark.parametrize("name", sorted(set(FILES) - {"png-palette", "webp-lossless"}))
def test_opaque_files_decode_as_pillow_opens_them(name: str) -> None:
    with Image.open(BytesIO(FILES[name])) as image:
        assert np.array_equal(rgb(FILES[name]), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_orientation_is_applied_in_every_container(name: str, orientation: int) -> None:
    image = Image.fromarray(smooth(24, 40))
    options: dict[str, object] = {"lossless": True} if name == "WEBP" else {}
    plain = rgb(save(image, name, **options))
    block = Image.Exif()
    block[0x0112] = orientation
    turned = rgb(save(image, name, exif=block, **options))
    assert turned.shape == ((24, 40, 3) if orientation < 5 else (40, 24, 3))
    assert np.array_equal(turned, TURNS[orientation](plain))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_stored_turned_is_seen_upright(orientation: int) -> None:
    """The other way round: the upright pixels are stored turned, as a camera does."""
    upright = noise(24, 40)
    back = {6: 8, 8: 6}.get(orientation, orientation)
    stored = np.ascontiguousarray(TURNS[back](upright))
    assert np.array_equal(rgb(save(Image.fromarray(stored), "PNG", exif=b"Exif\0\0" + exif(orientation))), upright)


def test_exif_after_the_pixels_and_broken_exif() -> None:
    rows = [bytes([y, x, 9, 40 + y, x, 200]) for y, x in ((1, 2), (3, 4), (5, 6))]
    plain = rgb(png((2, 3), 8, 2, rows))
    assert np.array_equal(rgb(png((2, 3), 8, 2, rows, late=chunk(b"eXIf", exif(6)))), np.rot90(plain, -1))
    for block in (exif(6)[:-9], b"II*\0\xff\xff\xff\xff", b"", b"x" * 40, exif(0), exif(9)):
        assert np.array_equal(rgb(png((2, 3), 8, 2, rows, extra=chunk(b"eXIf", block))), plain), block


@pytest.mark.parametrize(
    ("mode", "name"), [("RGBA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "TIFF"), ("LA", "PNG"), ("LA", "TIFF")]
)
def test_alpha_lies_on_white(mode: str, name: str) -> None:
    pixels = noise(30, 50, 4, seed=3)
    if mode == "LA":
        pixels = np.ascontiguousarray(pixels[..., [0, 3]])
    options: dict[str, object] = {"lossless": True, "exact": True} if name == "WEBP" else {}
    found = rgb(save(Image.fromarray(pixels, mode), name, **options))
    colour = pixels[..., :3] if mode == "RGBA" else np.repeat(pixels[..., :1], 3, -1)
    assert near(found, composed(colour, pixels[..., -1]), 1)
    assert (found[pixels[..., -1] == 0] == 255).all()


def test_palette_with_alpha_of_every_entry_and_of_one() -> None:
    index = np.arange(256, dtype=np.uint8).reshape(16, 16)
    image = Image.fromarray(index, "P")
    palette = noise(1, 256, seed=5)[0]
    image.putpalette(palette.tobytes())
    alphas = noise(1, 256, 1, seed=6)[0, :, 0]
    found = rgb(save(image, "PNG", transparency=alphas.tobytes()))
    assert near(found, composed(palette[index], alphas[index]), 1)
    for name in ("PNG", "GIF"):
        found = rgb(save(image, name, transparency=7))
        wanted = palette[index].copy()
        wanted[index == 7] = 255
        assert np.array_equal(found, wanted), name
    assert np.array_equal(rgb(save(image, "PNG")), palette[index])


@pytest.mark.parametrize(("bits", "values"), [(1, (0, 1)), (2, (0, 1, 2, 3)), (4, (0, 5, 9, 15)), (8, (0, 3, 77, 255))])
def test_grey_of_few_bits_with_and_without_a_transparent_value(bits: int, values: tuple[int, ...]) -> None:
    packed = sum(value << (8 * (bits * len(values) // 8 or 1) - bits * (i + 1)) for i, value in enumerate(values))
    row = packed.to_bytes(bits * len(values) // 8 or 1, "big")
    grey = [value * 255 // (2**bits - 1) for value in values]
    assert rgb(png((len(values), 1), bits, 0, [row]))[0, :, 1].tolist() == grey
    for i, value in enumerate(values):
        found = rgb(png((len(values), 1), bits, 0, [row], extra=chunk(b"tRNS", struct.pack(">H", value))))
        assert found[0, :, 2].tolist() == [*grey[:i], 255, *grey[i + 1 :]]


def test_true_colour_with_a_transparent_colour() -> None:
    key = chunk(b"tRNS", struct.pack(">3H", 10, 20, 30))
    found = rgb(png((2, 1), 8, 2, [bytes([10, 20, 30, 10, 20, 31])], extra=key))
    assert found[0].tolist() == [[255, 255, 255], [10, 20, 31]]
    wide = chunk(b"tRNS", struct.pack(">3H", 0x0A01, 0x1402, 0x1E03))
    row = struct.pack(">6H", 0x0A01, 0x1402, 0x1E03, 0xFF00, 0x1402, 0x8000)
    assert rgb(png((2, 1), 16, 2, [row], extra=wide))[0].tolist() == [[255, 255, 255], [255, 20, 128]]


def test_sixteen_bits_keep_their_high_byte() -> None:
    values = np.array([[0, 255, 256, 0x1234], [0x8000, 0xFEFF, 0xFF00, 0xFFFF]], np.uint16)
    high = (values >> 8).astype(np.uint8)
    for name in ("PNG", "TIFF"):
        assert np.array_equal(rgb(save(Image.fromarray(values), name))[..., 0], high), name
    big_endian = Image.frombytes("I;16B", (4, 2), values.astype(">u2").tobytes())
    assert np.array_equal(rgb(save(big_endian, "TIFF"))[..., 1], high)
    white_is_zero = save(Image.fromarray(values), "TIFF", tiffinfo={262: 0})
    assert np.array_equal(rgb(white_is_zero)[..., 1], 255 - high)
    keyed = rgb(png((4, 2), 16, 0, [row.astype(">u2").tobytes() for row in values], extra=chunk(b"tRNS", b"\x12\x34")))
    assert keyed[..., 2].tolist() == [[0, 0, 1, 255], high[1].tolist()]
    rgba = np.array([[[0x1234, 0x8000, 0xFFFF, 0xFFFF], [0, 0, 0, 0]]], np.uint16)
    assert rgb(png((2, 1), 16, 6, [rgba.astype(">u2").tobytes()]))[0].tolist() == [[0x12, 0x80, 0xFF], [255, 255, 255]]


@pytest.mark.parametrize(
    ("samples", "grey"),
    [
        (np.array([[0, 1, 2, 255]], np.int32), [0, 1, 2, 255]),
        (np.array([[0, 256, 0x1234, 65535]], np.int32), [0, 1, 0x12, 255]),
        (np.array([[-100, 0, 100]], np.int32), [0, 128, 255]),
        (np.array([[0, 2**30, 2**31 - 1]], np.int32), [0, 128, 255]),
        (np.array([[-5, -5]], np.int32), [0, 0]),
        (np.array([[0, 0.25, 1]], np.float32), [0, 64, 255]),
        (np.array([[0, 1, 100.4, 255]], np.float32), [0, 1, 100, 255]),
        (np.array([[-1, 0, 1]], np.float32), [0, 128, 255]),
        (np.array([[np.nan, np.inf, 1]], np.float32), [0, 0, 255]),
        (np.array([[-3e38, 3e38]], np.float32), [0, 255]),
    ],
)
def test_thirty_two_bit_samples(samples: np.ndarray, grey: list[int]) -> None:
    assert rgb(save(Image.fromarray(samples), "TIFF"))[0, :, 0].tolist() == grey


def test_cmyk_with_and_without_adobe_marker() -> None:
    """Adobe writes inverted inks; files without its marker are read so too, as browsers and Pillow do."""
    inks = np.dstack([smooth(40, 56), np.full((40, 56), 60, np.uint8)])
    light = 255 - inks.astype(int)
    wanted = np.rint(light[..., :3] * light[..., 3:] / 255).astype(np.uint8)
    adobe = save(Image.fromarray(inks, "CMYK"), "JPEG", quality=100, subsampling=0)
    assert near(rgb(adobe), wanted, 4)
    assert near(rgb(save(Image.fromarray(inks, "CMYK"), "TIFF")), wanted, 1)
    at = adobe.index(b"\xff\xee")
    plain = adobe[:at] + adobe[at + 2 + int.from_bytes(adobe[at + 2 : at + 4], "big") :]
    assert near(rgb(plain), wanted, 4)


@pytest.mark.parametrize("mode", ["1", "L", "YCbCr", "LAB"])
def test_other_modes(mode: str) -> None:
    image = Image.fromarray(smooth(20, 30)).convert("RGB" if mode == "LAB" else mode)
    if mode == "LAB":
        image = Image.merge("LAB", image.split())
    assert near(rgb(save(image, "TIFF")), np.asarray(image.convert("RGB")), 0)


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG", "AVIF", "TIFF"])
def test_animation_shows_its_first_frame(name: str) -> None:
    frames = [Image.fromarray(np.full((24, 40, 3), value, np.uint8)) for value in (30, 120, 220)]
    found = rgb(save(frames[0], name, save_all=True, append_images=frames[1:]))
    assert near(found, np.full((24, 40, 3), 30, np.uint8), 2)


def test_multi_picture_jpeg_of_a_phone_shows_the_main_picture() -> None:
    """12 Mpx, EXIF orientation 6, a second picture and a film behind the first."""
    small = Image.fromarray(smooth(30, 40)).resize((4000, 3000))
    main = save(small, "JPEG", exif=b"Exif\0\0" + exif(6))
    found = rgb(main + save(Image.new("RGB", (8, 8), "red"), "JPEG") + b"\0\0\0\x18ftypmp42" + b"\xff\xda" * 500)
    assert found.shape == (4000, 3000, 3)
    assert near(found[::500, ::500], np.rot90(np.asarray(small), -1)[::500, ::500], 6)


@pytest.mark.parametrize("band_pixels", [1, 70, 600])
def test_bands_do_not_show(monkeypatch: pytest.MonkeyPatch, band_pixels: int) -> None:
    """Small images fit in one band; here they do not."""
    grey = np.arange(15 * 20).reshape(15, 20)
    files = dict(FILES)
    files["orientation"] = save(Image.fromarray(noise(30, 20)), "PNG", exif=b"Exif\0\0" + exif(8))
    files["16 bits"] = save(Image.fromarray((grey * 200).astype(np.uint16)), "PNG")
    files["integers"] = save(Image.fromarray((grey - 50).astype(np.int32)), "TIFF")
    files["floats"] = save(Image.fromarray((grey / 7).astype(np.float32)), "TIFF")
    files["cmyk"] = save(Image.fromarray(noise(15, 20, 4), "CMYK"), "TIFF")
    whole = {name: rgb(data) for name, data in files.items()}
    monkeypatch.setattr(colours, "BAND_PIXELS", band_pixels)
    assert [name for name, data in files.items() if not np.array_equal(rgb(data), whole[name])] == []


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("orientation", [1, 5])
def test_decoded_image_is_whole_without_its_file(name: str, orientation: int) -> None:
    """Recipes resize, crop and paste it."""
    data = FILES[name]
    if orientation == 5 and name in ("png", "jpeg"):
        data = save(Image.open(BytesIO(data)), name.upper(), exif=b"Exif\0\0" + exif(5))
    image = decode(data, LIMITS)
    pixels = np.asarray(image)
    assert np.array_equal(np.asarray(image.crop((3, 5, 30, 40))), pixels[5:40, 3:30])
    assert np.array_equal(np.asarray(image.resize((9, 7))), np.asarray(Image.fromarray(pixels).resize((9, 7))))


def test_pixels_are_admitted_once_before_they_are_decoded() -> None:
    asked: list[int] = []
    decode(FILES["webp"], LIMITS, asked.append)
    with pytest.raises(ImageTooLarge):
        decode(FILES["webp"], ImageLimits(max_image_side=60), asked.append)
    decode(FILES["png"], LIMITS, asked.append)
    assert asked == [41 * 67 * 2, 41 * 67]


def test_one_pixel() -> None:
    for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"):
        assert rgb(save(Image.new("RGB", (1, 1), "white"), name)).tolist() == [[[255, 255, 255]]], name
    assert rgb(PNG_MAGIC + png((1, 1), 8, 0, [b"\x07"])[8:]).tolist() == [[[7, 7, 7]]]


def test_heic_without_its_extra_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(UnsupportedImage, match="HEIC"):
        decode(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100), LIMITS)


@pytest.mark.parametrize("orientation", [1, 6])
def test_heic_with_its_extra(orientation: int) -> None:
    heif = pytest.importorskip("pillow_heif")
    file = BytesIO()
    source = smooth(48, 64)
    heif.from_pillow(Image.fromarray(source)).save(file, quality=95, exif=b"Exif\0\0" + exif(orientation))
    assert near(rgb(file.getvalue()), TURNS[orientation](source), 12)
