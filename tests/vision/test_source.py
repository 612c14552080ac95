"""What comes of a fetch: answers that are no image, bytes and time that end it, and limits that make sense."""

import asyncio
import resource
import time

import pytest

from tests.vision.canary import ALLOWED, SITE, Detour, answer, moved, run, site
from tests.vision.pictures import FILES
from vision.errors import ImageError, ImageTooLarge, SourceFailed
from vision.limits import ImageLimits
from vision.source import Fetcher

PNG = FILES["png"]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (answer(PNG, kind="text/html"), "'text/html', which is not an image type"),
        (answer(PNG, kind="application/json; x=image/png"), "not an image type"),
        (answer(PNG, extra="content-encoding: gzip\r\n"), "compressed body"),
        (answer(PNG, status="404 Not Found"), "status 404"),
        (answer(PNG, status="206 Partial"), "status 206"),
        (answer(PNG, status="304 Same"), "status 304"),
        (answer(b""), "empty body"),
        (answer(PNG)[:-100], "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nabc", "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd", "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 300_000, "RemoteProtocolError"),
        (b"SSH-2.0-OpenSSH_9\r\n", "RemoteProtocolError"),
        (b"", "RemoteProtocolError"),
    ],
)
def test_answers_that_are_no_image(page: bytes, said: str) -> None:
    async def main() -> None:
        async with site(ALLOWED) as (bird, fetcher, _):
            bird.pages["/a"] = page
            with pytest.raises(SourceFailed, match=said):
                await fetcher.fetch("http://img.test/a")

    run(main())


def test_bytes_are_limited_whatever_the_length_says() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(300):
            writer.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
            await writer.drain()
            sent.append(1 << 20)

    sent: list[int] = []

    async def main() -> None:
        async with site(ALLOWED) as (bird, fetcher, _):
            bird.pages |= {
                "/endless": endless,
                "/claims": b"HTTP/1.1 200 OK\r\ncontent-length: 314572800\r\n\r\n",
                "/claims-much": b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n",
                "/more-than-said": b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabcdefghi",
                "/plain": answer(PNG, kind="application/octet-stream"),
                "/no-type": b"HTTP/1.1 200 OK\r\n\r\n" + PNG,
            }
            before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
            for path in ("/endless", "/claims", "/claims-much"):
                with pytest.raises(ImageTooLarge, match="more than 20971520 bytes, which is the limit"):
                    await fetcher.fetch(f"http://img.test{path}")
            assert time.perf_counter() - start < 10 and sum(sent) < 40 << 20
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
            assert await fetcher.fetch("http://img.test/more-than-said") == b"abc"
            assert await fetcher.fetch("http://img.test/plain") == await fetcher.fetch("http://img.test/no-type") == PNG

    run(main())


@pytest.mark.parametrize("silent", ["before", "head", "body", "redirects"])
def test_slow_sites_cost_the_time_limit_and_no_more(silent: str) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        whole = answer(bytes(5000)) if silent != "redirects" else moved("/a")
        writer.write({"body": whole[:200], "head": whole[:9], "redirects": b"", "before": b""}[silent])
        await asyncio.sleep(10 if silent == "before" else 0.12)
        for byte in whole[200:] if silent == "body" else whole[9:] if silent == "head" else b"":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.write(whole if silent == "redirects" else b"")

    limits = ImageLimits(allowed_media_domains=("img.test",), media_fetch_seconds=0.3, max_media_redirects=50)

    async def main() -> None:
        async with site(limits) as (bird, fetcher, _):
            bird.pages["/a"] = drip
            start = time.perf_counter()
            with pytest.raises(SourceFailed, match=r"within 0\.3 seconds"):
                await fetcher.fetch("http://img.test/a")
            assert 0.25 < time.perf_counter() - start < 5

    run(main())


def test_a_slow_name_server_counts_too() -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.sleep(10)
        return [SITE]

    async def main() -> None:
        limits = ImageLimits(allowed_media_domains=("img.test",), media_fetch_seconds=0.1)
        fetcher = Fetcher(limits, resolve=never, transport=Detour(9))
        with pytest.raises(SourceFailed, match=r"within 0\.1 seconds"):
            await fetcher.fetch("http://img.test/a")
        await fetcher.aclose()

    run(main())


def test_a_closed_port_and_many_at_once() -> None:
    async def main() -> None:
        async with site(ALLOWED) as (bird, fetcher, detour):
            bird.pages["/a"] = answer(PNG)
            found = await asyncio.gather(*(fetcher.fetch("http://img.test/a") for _ in range(40)))
            assert found == [PNG] * 40 and len(bird.seen) == 40
            detour.port = 1
            with pytest.raises(SourceFailed, match="ConnectError"):
                await fetcher.fetch("http://img.test/a")

    run(main())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_image_bytes", 0), ("max_image_pixels", -1), ("max_image_side", 0), ("media_fetch_seconds", 0.0),
        ("max_media_redirects", -1), ("allowed_media_domains", ("http://a",)), ("allowed_media_domains", (".",)),
    ],
)  # fmt: skip
def test_limits_that_make_no_sense(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        ImageLimits(**{field: value})


def test_kinds_are_stable_and_messages_short() -> None:
    kinds = {error.kind for error in ImageError.__subclasses__() if error.__module__ == "vision.errors"}
    assert kinds == {
        "bad_image_url", "image_source_refused", "image_source_failed", "image_too_large", "unsupported_image_format",
        "corrupt_image",
    }  # fmt: skip
