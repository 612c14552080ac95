"""The image pipeline: right pixels in the right order, keys that tell apart, and errors that are the client's."""

import numpy as np
import pytest
from PIL import Image

from server.images import ImagePipeline
from tests.server.pipelines import LLAVA, A, B, failure, llava, onevision, picture_url, prepared, run
from tests.vision.pictures import FILES, data_url, exif, noise, png_bomb, save
from tests.vision.preprocess_pictures import as_pil
from vision.config import read_preprocessor
from vision.limits import ImageLimits


def test_images_come_in_order_as_the_recipe_makes_them() -> None:
    recipe = llava().recipe
    found = run(prepared(A, B, A))
    for image, seed in zip(found, (1, 2, 1), strict=True):
        tiles_NHWC = recipe.tiles(as_pil(noise(40, 60, seed=seed)))
        assert image.pixels.data == tiles_NHWC.tobytes() and len(image.key) == 32
        assert image.layout == recipe.layout(40, 60)
        pixels = image.pixels
        assert (pixels.tiles, pixels.height, pixels.width, pixels.num_pixels) == (1, 28, 28, 784)
        assert (pixels.rows, pixels.cols, pixels.image_height, pixels.image_width) == (0, 0, 40, 60)
    assert found[0].key == found[2].key != found[1].key
    assert run(prepared()) == ()


def test_results_cannot_be_written_to() -> None:
    data = run(prepared(A))[0].pixels.data
    assert isinstance(data, memoryview) and data.readonly and (data.ndim, data.itemsize) == (1, 1)


def test_one_image_and_several_may_be_cut_differently() -> None:
    single = run(prepared(A, preprocessor=onevision()))[0]
    pair = run(prepared(A, A, preprocessor=onevision()))
    assert (single.layout.tiles, pair[0].layout.tiles) == (5, 1)
    assert pair[0].key == pair[1].key != single.key


def test_keys_tell_apart_what_differs() -> None:
    """Size, mode, alpha, orientation, preprocessing and salt; not the white space around the URL."""
    pixels = noise(40, 60)
    rgba = np.dstack([pixels, np.full((40, 60), 90, np.uint8)])
    files = [
        save(Image.fromarray(pixels), "PNG"),
        save(Image.fromarray(pixels.reshape(60, 40, 3)), "PNG"),
        save(Image.fromarray(pixels).convert("L"), "PNG"),
        save(Image.fromarray(rgba), "PNG"),
        save(Image.fromarray(pixels), "PNG", exif=b"Exif\0\0" + exif(3)),
    ]
    keys = [image.key for image in run(prepared(*map(data_url, files)))]
    keys += [run(prepared(A))[0].key, run(prepared(A, salt=b"s"))[0].key]
    other = read_preprocessor({"size": 28, "crop_size": 28, "resample": 2}, None, LLAVA)
    keys.append(run(prepared(A, preprocessor=other))[0].key)
    assert len(set(keys)) == 8
    assert run(prepared(f"  {A}\n"))[0].key == run(prepared(A))[0].key == run(prepared(A, B))[0].key


# refusals


def test_as_many_images_as_the_limit_and_one_more() -> None:
    async def main() -> None:
        pipeline = ImagePipeline(llava(), ImageLimits(limit_mm_per_prompt=3))
        assert len(await pipeline.prepare([A] * 3, b"")) == 3
        error = await failure(pipeline, *[A] * 4)
        assert (error.status, error.code, error.param) == (400, "too_many_images", "messages")
        assert "has 4 images; the limit is 3 " in error.message
        await pipeline.aclose()

    run(main())


LINE = data_url(save(Image.new("RGB", (2000, 1)), "PNG"))


@pytest.mark.parametrize(
    ("url", "status", "code", "said"),
    [
        (data_url(bytes(60_001)), 413, "image_too_large", "more than 60000 bytes, which is the limit"),
        (picture_url(3, 101, 100), 413, "image_too_large", "100 x 101; the limit is 10000 pixels"),
        (data_url(png_bomb(20_000)), 413, "image_too_large", "20000 x 20000; the limit is 16384 pixels a side"),
        (LINE, 400, "image_shape", "2000 x 1 pixels would be resized"),
        (data_url(FILES["jpeg"][:-300]), 400, "corrupt_image", "truncated"),
        (data_url(b"<svg/>"), 400, "unsupported_image_format", "SVG"),
        ("data:image/png;base64,@@@@", 400, "bad_image_url", "not valid base64"),
        ("", 400, "bad_image_url", "Not an image URL"),
        ("file:///etc/passwd", 400, "image_source_refused", "file:"),
        ("https://example.com/a.png", 400, "image_source_refused", "only be sent as data: URLs"),
    ],
)
def test_each_kind_of_error(url: str, status: int, code: str, said: str) -> None:
    recipe = read_preprocessor({"size": 2000, "crop_size": 28}, None, LLAVA) if url == LINE else llava()

    async def main() -> None:
        limits = ImageLimits(max_image_bytes=60_000, max_image_pixels=10_000)
        pipeline = ImagePipeline(recipe, limits)
        error = await failure(pipeline, picture_url(1, 28, 28), url, "nonsense")
        assert (error.status, error.code, error.param) == (status, code, "messages")
        assert error.message.startswith("Image 2: ") and said in error.message and len(error.message) < 300
        await pipeline.aclose()

    run(main())
