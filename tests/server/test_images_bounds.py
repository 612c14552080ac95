"""Pixels in memory, fetches at a time and time of the event loop are bounded, errors and all."""

import asyncio
import threading

from PIL import Image

from server.images import ImagePipeline, PixelRoom
from tests.server.pipelines import LIMITS, failure, llava, run
from tests.vision.canary import answer, site
from tests.vision.pictures import FILES, data_url, png_bomb, save, smooth
from vision.limits import ImageLimits


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
            await asyncio.sleep(0)
            ticks += 1
        assert len({image.key for image in await work}) == 12
        await pipeline.aclose()
        return ticks

    assert run(main()) > 100, "each image takes several milliseconds, and the loop ran all the time"
