"""The image pipeline: right pixels in the right order, one piece of work for equal images, bounds, and errors that are
the client's."""

import asyncio
import base64
import threading
from collections.abc import Coroutine
from typing import TypeVar

import numpy as np
import pytest
from PIL import Image

import server.images
from server.errors import ApiError
from server.images import ImagePipeline, PixelRoom
from server.single_flight import SingleFlight
from tests.vision.canary import answer, site
from tests.vision.pictures import FILES, exif, noise, png_bomb, save, smooth
from tests.vision.preprocess_pictures import as_pil
from vision.config import Preprocessor, read_preprocessor
from vision.image import decode
from vision.limits import ImageLimits

T = TypeVar("T")
LIMITS = ImageLimits()
PINPOINTS = [[28, 56], [56, 28], [56, 56]]
LLAVA = {"model_type": "llava", "image_token_id": 1, "vision_config": {"image_size": 28, "patch_size": 14}}
ONEVISION = {
    **LLAVA,
    "model_type": "llava_onevision",
    "image_grid_pinpoints": PINPOINTS,
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
}


def run(work: Coroutine[None, None, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


def llava() -> Preprocessor:
    return read_preprocessor({"size": 28, "crop_size": 28}, None, LLAVA)


def onevision() -> Preprocessor:
    file = {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS}
    return read_preprocessor(file, None, ONEVISION)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def picture_url(seed: int, height: int = 40, width: int = 60) -> str:
    return data_url(save(Image.fromarray(noise(height, width, seed=seed)), "PNG"))


A, B = picture_url(1), picture_url(2)


class Counter:
    """Counts the files that are decoded, as the pipeline sees `decode`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.gate = threading.Event()
        self.gate.set()
        monkeypatch.setattr(server.images, "decode", self)

    def __call__(self, data: bytes, limits: ImageLimits, admit: object) -> Image.Image:
        self.calls += 1
        assert self.gate.wait(20)
        return decode(data, limits, admit)  # type: ignore[arg-type]


async def prepared(
    *urls: str, salt: bytes = b"", preprocessor: Preprocessor | None = None
) -> tuple[server.images.PreparedImage, ...]:
    pipeline = ImagePipeline(preprocessor or llava(), LIMITS)
    try:
        return await pipeline.prepare(urls, salt)
    finally:
        await pipeline.aclose()


async def failure(pipeline: ImagePipeline, *urls: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await pipeline.prepare(urls, b"")
    return caught.value


# what comes out


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


# once for all


def test_equal_images_at_the_same_time_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)

    async def main() -> None:
        pipeline = ImagePipeline(llava(), ImageLimits(image_cache_bytes=0))
        found = await asyncio.gather(*(pipeline.prepare([A, B, A], b"") for _ in range(64)))
        assert counter.calls == 2
        assert all(images[0] is found[0][0] and images[1] is found[0][1] for images in found)
        await pipeline.prepare([A], b"")
        assert counter.calls == 3, "no cache"
        await pipeline.aclose()

    run(main())


def test_at_the_same_time_nothing_is_shared_with_another_recipe_or_salt() -> None:
    async def main() -> None:
        pipeline = ImagePipeline(onevision(), LIMITS)
        asked = ([A], b""), ([A, A], b""), ([A], b"salt"), ([A, A], b"salt")
        found = [images[0] for images in await asyncio.gather(*(pipeline.prepare(*each) for each in asked))]
        assert [image.layout.tiles for image in found] == [5, 1, 5, 1]
        assert len({image.key for image in found}) == 4
        await pipeline.aclose()

    run(main())


def test_results_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)
    urls = [picture_url(seed) for seed in range(3)]

    async def main() -> None:
        pipeline = ImagePipeline(llava(), ImageLimits(image_cache_bytes=2 * 28 * 28 * 3))
        for url, decoded in ((0, 1), (0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4), (0, 4), (2, 5)):
            await pipeline.prepare([urls[url]], b"")
            assert counter.calls == decoded, (url, decoded)
        await pipeline.prepare([urls[2]], b"salt")
        assert counter.calls == 6, "what another salt has sent shows in nothing, not even in time"
        await pipeline.aclose()

    run(main())


def test_errors_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)
    broken = data_url(FILES["png"][:-30])

    async def main() -> None:
        pipeline = ImagePipeline(llava(), LIMITS)
        errors = await asyncio.gather(*(failure(pipeline, A, broken) for _ in range(8)))
        assert {(error.code, error.message[:8]) for error in errors} == {("corrupt_image", "Image 2:")}
        assert counter.calls == 2
        await failure(pipeline, broken)
        assert counter.calls == 3
        await pipeline.aclose()

    run(main())


def test_a_cancelled_request_leaves_the_others_and_takes_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)
    counter.gate.clear()
    threads = server.images.usable_cores()

    async def main() -> None:
        pipeline = ImagePipeline(llava(), LIMITS)
        first, second = (asyncio.create_task(pipeline.prepare([A], b"")) for _ in range(2))
        gone = [asyncio.create_task(pipeline.prepare([picture_url(seed)], b"")) for seed in range(10, 14 + threads)]
        while counter.calls < threads:
            await asyncio.sleep(0.001)
        for task in (first, *gone):
            task.cancel()
        await asyncio.gather(first, *gone, return_exceptions=True)
        assert len(pipeline._flights) == 1
        counter.gate.set()
        assert (await second)[0].layout.height == 28
        assert counter.calls <= threads, "what had not begun never does"
        assert len(pipeline._flights) == 0
        await pipeline.aclose()

    run(main())


def test_single_flight() -> None:
    async def main() -> None:
        flights: SingleFlight[int] = SingleFlight()
        started = 0

        async def work() -> int:
            nonlocal started
            started += 1
            await asyncio.sleep(0.01)
            if started == 2:
                raise ValueError("once")
            return started

        assert await asyncio.gather(*(flights.run("a", work) for _ in range(5))) == [1] * 5
        failed = await asyncio.gather(*(flights.run("a", work) for _ in range(5)), return_exceptions=True)
        assert [str(error) for error in failed] == ["once"] * 5
        assert await flights.run("a", work) == 3
        assert len(flights) == 0
        task = asyncio.create_task(flights.run("a", work))
        await asyncio.sleep(0)
        await flights.aclose()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


# from afar


def test_a_url_that_many_want_is_fetched_once_and_a_slow_one_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)
    limits = ImageLimits(allowed_media_domains=("img.test",), media_fetch_seconds=20)
    url = "http://img.test/a.png"

    async def main() -> None:
        enough = asyncio.Event()

        async def hang(writer: asyncio.StreamWriter) -> None:
            await enough.wait()

        async with site(limits) as (bird, fetcher, _):
            bird.pages = {"/a.png": answer(FILES["png"]), **{f"/{number}": hang for number in range(8)}}
            pipeline = ImagePipeline(llava(), limits, fetcher=fetcher)
            slow = [asyncio.create_task(failure(pipeline, f"http://img.test/{number}")) for number in range(8)]
            found = await asyncio.gather(*(pipeline.prepare([url, data_url(FILES["png"])], b"") for _ in range(20)))
            assert not any(task.done() for task in slow)
            assert len({images[0].key for images in found} | {images[1].key for images in found}) == 1
            assert sum("/a.png" in head for head in bird.seen) == 1 and counter.calls <= 2
            enough.set()
            errors = await asyncio.gather(*slow)
            assert {(error.status, error.code) for error in errors} == {(400, "image_source_failed")}
            assert errors[0].message.startswith("Image 1: The image could not be fetched")
            await pipeline.aclose()

    run(main())


def test_fetches_are_bounded() -> None:
    limits = ImageLimits(allowed_media_domains=("img.test",), max_media_fetches=2)
    inside = most = 0

    async def slow(writer: asyncio.StreamWriter) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        writer.write(answer(FILES["png"]))
        await writer.drain()

    async def main() -> None:
        async with site(limits) as (bird, fetcher, _):
            bird.pages = {f"/{number}": slow for number in range(8)}
            pipeline = ImagePipeline(llava(), limits, fetcher=fetcher)
            await asyncio.gather(*(pipeline.prepare([f"http://img.test/{n}"], b"") for n in range(8)))
            await pipeline.aclose()

    run(main())
    assert most == 2


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


# bounds


def test_pixel_room_is_never_exceeded_and_large_ones_get_their_turn() -> None:
    room, lock = PixelRoom(100), threading.Lock()
    inside, most, alone = 0, 0, []

    def work(pixels: int) -> None:
        nonlocal inside, most
        for _ in range(30):
            with room.entered() as admit:
                admit(pixels)
                with lock:
                    inside += pixels
                    most = max(most, inside) if pixels < 100 else most
                    if pixels > 100:
                        alone.append(inside == pixels)
                with lock:
                    inside -= pixels

    threads = [threading.Thread(target=work, args=(pixels,)) for pixels in (10, 60, 60, 99, 250)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert most <= 100 and alone == [True] * 30
    assert room._used == 0


def test_room_is_given_back_after_errors() -> None:
    async def main() -> None:
        pipeline = ImagePipeline(llava(), LIMITS)
        for data in (FILES["jpeg"][:-300], FILES["png"][:-40], b"", png_bomb(20_000)):
            await failure(pipeline, data_url(data))
        assert pipeline._room._used == 0
        await pipeline.aclose()

    run(main())


def test_an_error_holds_no_pixels() -> None:
    """Its traceback would, for as long as the answer takes."""

    async def main() -> None:
        pipeline = ImagePipeline(llava(), LIMITS)
        outcome = pipeline._outcome(lambda: FILES["jpeg"][:-300], pipeline._variants[0], b"")
        assert isinstance(outcome, Exception)
        assert outcome.__traceback__ is outcome.__cause__ is outcome.__context__ is None
        await pipeline.aclose()

    run(main())


def test_the_loop_runs_while_an_album_of_photographs_is_prepared() -> None:
    photograph = Image.fromarray(smooth(75, 100)).resize((2000, 1500))
    urls = [data_url(save(photograph, "JPEG", quality=80 + n)) for n in range(12)]

    async def main() -> int:
        pipeline = ImagePipeline(llava(), LIMITS)
        work = asyncio.create_task(pipeline.prepare(urls, b""))
        ticks = 0
        while not work.done():
            await asyncio.sleep(0.002)
            ticks += 1
        assert len({image.key for image in await work}) == 12
        await pipeline.aclose()
        return ticks

    assert run(main()) > 12, "each image takes several milliseconds, and the loop ran in each"
