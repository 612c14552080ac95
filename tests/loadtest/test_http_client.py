"""The client: connections, framings, errors, time stamps."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from loadtest.http_client import StreamingClient, Target, TransportError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"


class Scripted:
    """A server that answers each request of each connection with the next step of a script."""

    def __init__(self, *steps: tuple[bytes, ...] | None) -> None:
        self._steps = list(steps)
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A step is what to write, piece by piece; None closes the connection without an answer."""
        self.connections += 1
        try:
            while self._steps:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                step = self._steps.pop(0)
                if step is None:
                    break
                for piece in step:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.02)
                if b"until close" in b"".join(step):
                    break
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()


def talk(script: Scripted, count: int, timeout: float = 5.0) -> list[object]:
    """What `count` posts, one after the other, come to: status and body, or the kind of the error."""

    async def work() -> list[object]:
        server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = StreamingClient(Target.parse(f"http://127.0.0.1:{port}/base/v1"), {"x-key": "k"}, timeout)
        results: list[object] = []
        for _ in range(count):
            body = bytearray()
            try:
                status = await client.post("/v1/x", b"{}", lambda _, piece, body=body: body.extend(piece))
                results.append((status, bytes(body)))
            except TransportError as error:
                results.append(error.kind)
        client.close()
        server.close()
        await server.wait_closed()
        return results

    return asyncio.run(work())


def test_a_connection_is_used_again() -> None:
    script = Scripted((LENGTH + b"hello",), (LENGTH, b"he", b"llo"))
    assert talk(script, 2) == [(200, b"hello"), (200, b"hello")]
    assert script.connections == 1
    assert script.requests[0].startswith(b"POST /base/v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"x-key: k\r\n" in script.requests[0] and script.requests[0].endswith(b"\r\n\r\n{}")


def test_every_framing_is_read() -> None:
    chunked = (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n", b"\r\n")
    closing = (b"HTTP/1.1 503 X\r\nconnection: close\r\n\r\nuntil ", b"close")
    script = Scripted(chunked, closing, (LENGTH + b"hello",))
    assert talk(script, 3) == [(200, b"hello"), (503, b"until close"), (200, b"hello")]
    assert script.connections == 2


def test_a_kept_connection_that_the_server_dropped_is_no_failure() -> None:
    script = Scripted((LENGTH + b"hello",), None, (LENGTH + b"hello",))
    assert talk(script, 2) == [(200, b"hello"), (200, b"hello")]
    assert len(script.requests) == 3


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (None, "connection lost"),
        ((b"hello\r\n\r\n",), "not HTTP"),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nuntil close"[:-2],), "time-out"),
    ],
)
def test_failures_have_a_kind(step: tuple[bytes, ...] | None, kind: str) -> None:
    assert talk(Scripted(step, None), 1, timeout=0.3 if kind == "time-out" else 5) == [kind]


def test_an_answer_that_breaks_off_is_not_asked_for_again() -> None:
    broken = (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n", b"until close")
    script = Scripted((LENGTH + b"hello",), broken, (LENGTH + b"hello",))
    assert talk(script, 2) == [(200, b"hello"), "connection lost"]
    assert len(script.requests) == 2


def test_nobody_there_is_told() -> None:
    async def work() -> str:
        server = await asyncio.start_server(Scripted().serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        with pytest.raises(TransportError) as caught:
            await StreamingClient(Target.parse(f"http://127.0.0.1:{port}"), {}, 5).post("/", b"", lambda *_: None)
        return caught.value.kind

    assert asyncio.run(work()) == "no connection"


def test_pieces_are_stamped_when_they_come() -> None:
    times: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(LENGTH)
        for letter in (b"h", b"e", b"l", b"l", b"o"):
            await asyncio.sleep(0.02)
            times.append(time.perf_counter())
            writer.write(letter)
        writer.close()

    async def work() -> list[float]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = StreamingClient(Target.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), {}, 5)
        arrived: list[float] = []
        await client.post("/", b"", lambda when, _: arrived.append(when))
        client.close()
        server.close()
        return arrived

    arrived = asyncio.run(work())
    assert len(arrived) == 5
    assert all(late >= early for early, late in zip(times, arrived, strict=True))
    assert sorted(late - early for early, late in zip(times, arrived, strict=True))[2] < 0.015


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h:8000", Target("h", 8000, False, "")),
        ("http://h/v1/", Target("h", 80, False, "")),
        ("https://h/openai/v1", Target("h", 443, True, "/openai")),
        ("http://[::1]:9", Target("::1", 9, False, "")),
    ],
)
def test_addresses(url: str, target: Target) -> None:
    assert Target.parse(url) == target


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "http://", "http://h:port"])
def test_what_is_no_address_is_told(url: str) -> None:
    with pytest.raises(ValueError, match=r"address such as http|port|Port"):
        Target.parse(url)


def test_the_host_of_an_ipv6_address_is_bracketed() -> None:
    assert Target.parse("http://[::1]:9").host_header == "[::1]:9"
