"""Equal images are fetched and decoded once for all who may share them, and kept up to a number of bytes."""

import asyncio

import pytest

import server.images
from server.images import ImagePipeline
from tests.server.pipelines import LIMITS, A, B, Counter, failure, llava, onevision, picture_url, run
from tests.vision.canary import answer, site
from tests.vision.pictures import FILES, data_url
from vision.limits import ImageLimits


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
