"""A small HTTP server on this machine that counts who comes: as a stranger's web site, and as the inside that no URL
may reach."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress

import httpx

from vision.limits import ImageLimits
from vision.source import Fetcher

SITE = "93.184.216.34"
"""The public address that the site is said to have."""
ALLOWED = ImageLimits(allowed_media_domains=("img.test", ".cdn.test"), media_fetch_seconds=2.0)
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Canary:
    """`pages` maps a path to what is written on the connection; `seen` are the request heads that came."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes | Answer] = {}
        self.seen: list[str] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.seen.append(head)
            page = self.pages.get(head.split()[1], b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")
            if isinstance(page, bytes):
                writer.write(page)
                await writer.drain()
            else:
                await page(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.seen.append("(gone)")
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def canary() -> AsyncIterator[Canary]:
    """Listens on the loopback addresses."""
    bird = Canary()
    server = await asyncio.start_server(bird.serve, "127.0.0.1", 0)
    bird.port = server.sockets[0].getsockname()[1]
    try:
        yield bird
    finally:
        server.close()
        await server.wait_closed()


class Detour(httpx.AsyncBaseTransport):
    """Carries requests for the site's public address to the canary, really; everything else goes where it says."""

    def __init__(self, port: int) -> None:
        self.port, self.requests, self.targets = port, list[httpx.Request](), list[str]()
        self._real = httpx.AsyncHTTPTransport(trust_env=False, verify=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.targets.append(str(request.url))
        if request.url.host == SITE:
            request.url = request.url.copy_with(scheme="http", host="127.0.0.1", port=self.port)
        return await self._real.handle_async_request(request)

    async def aclose(self) -> None:
        await self._real.aclose()


class Names:
    """A name server that gives one answer after the other, the last one for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers, self.asked = list(answers) or [[SITE]], list[str]()

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@asynccontextmanager
async def site(limits: ImageLimits, names: Names | None = None) -> AsyncIterator[tuple[Canary, Fetcher, Detour]]:
    """The canary as a public site, and a fetcher that finds it."""
    async with canary() as bird:
        detour = Detour(bird.port)
        fetcher = Fetcher(limits, resolve=names or Names(), transport=detour)
        try:
            yield bird, fetcher, detour
        finally:
            await fetcher.aclose()


def answer(body: bytes, *, kind: str = "image/png", extra: str = "", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
    return head.encode("latin-1") + body


def moved(target: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Moved\r\nlocation: {target}\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n".encode(
        "latin-1"
    )


def run(work: Coroutine[None, None, None]) -> None:
    """In a fresh event loop."""
    asyncio.run(asyncio.wait_for(work, 20))
