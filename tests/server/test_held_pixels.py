"""What is ready while its request waits for other images is bounded, for one request and for all together."""

import asyncio
import weakref

from server.images import ImagePipeline
from tests.server.pipelines import failure, llava, picture_url, run
from tests.vision.canary import answer, site
from tests.vision.pictures import FILES
from vision.limits import ImageLimits

SIZE = 28 * 28 * 3
URLS = [picture_url(seed) for seed in range(50, 56)]


def test_one_request_with_more_pixels_than_an_empty_queue_holds() -> None:
    async def main() -> None:
        pipeline = ImagePipeline(llava(), ImageLimits(max_queued_image_bytes=3 * SIZE))
        assert len(await pipeline.prepare([*URLS[:3], *URLS[:3]], b"")) == 6
        error = await failure(pipeline, *URLS[:4])
        assert (error.status, error.param) == (400, "messages")
        assert f"have {4 * SIZE} bytes" in error.message and f"{3 * SIZE} is the limit" in error.message
        assert len(await pipeline.prepare(URLS[3:6], b"")) == 3
        await pipeline.aclose()

    run(main())


def test_requests_that_wait_are_counted_together_and_each_image_once() -> None:
    limits = ImageLimits(max_queued_image_bytes=3 * SIZE, allowed_media_domains=("img.test",), media_fetch_seconds=20)

    async def main() -> None:
        enough, waiting = asyncio.Event(), asyncio.Semaphore(0)

        async def hang(writer: asyncio.StreamWriter) -> None:
            waiting.release()
            await enough.wait()
            writer.write(answer(FILES["png"]))
            await writer.drain()

        async with site(limits) as (bird, fetcher, _):
            bird.pages = {"/slow": hang}
            pipeline = ImagePipeline(llava(), limits, fetcher=fetcher)
            slow = [asyncio.create_task(pipeline.prepare([*URLS[:2], "http://img.test/slow"], b"")) for _ in range(4)]
            await waiting.acquire()
            while pipeline._held._used < 2 * SIZE:
                await asyncio.sleep(0.001)
            error = await failure(pipeline, *URLS[2:4])
            assert (error.status, error.retry_after) == (429, 1)
            assert "the images of other requests have" in error.message
            assert len(await pipeline.prepare([URLS[2]], b"")) == len(await pipeline.prepare([URLS[0]], b"")) == 1
            slow[0].cancel()
            enough.set()
            assert [len(images) for images in await asyncio.gather(*slow[1:])] == [3] * 3
            assert pipeline._held._used == 0
            assert len(await pipeline.prepare(URLS[2:5], b"")) == 3
            await pipeline.aclose()

    run(main())


def test_pixels_that_a_request_still_has_are_in_memory_once() -> None:
    """Although the cache has dropped them, and they are decoded again."""

    async def main() -> None:
        pipeline = ImagePipeline(llava(), ImageLimits(image_cache_bytes=SIZE))
        first = await pipeline.prepare(URLS[:1], b"")
        await pipeline.prepare(URLS[1:2], b"")
        again = await pipeline.prepare(URLS[:1], b"")
        assert first[0].pixels.data is again[0].pixels.data and first[0].key == again[0].key
        alive = weakref.ref(first[0].pixels.data)
        del first, again
        await pipeline.prepare(URLS[1:2], b"")
        pipeline._pool.shutdown()  # a thread has its last result until it looks for more work
        assert alive() is None, "and not longer than that"
        await pipeline.aclose()

    run(main())
