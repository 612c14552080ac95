"""A small HTTP/1.1 client that stamps every piece of an answer when it arrives. Used by `loadtest/runner.py`.

General clients spend more time on a streamed token than a gateway does; then the load tester measures itself. Here a
piece goes from the socket through a C parser to its reader in one call. Everything runs on the event loop's thread.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

OnPiece = Callable[[float, bytes], None]
"""Receives the time of arrival (`time.perf_counter`, seconds) and some bytes of the body."""


class TransportError(Exception):
    """No whole answer came. `kind` is one of a few words to count by."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is: the parts of its URL."""

    host: str
    port: int
    is_tls: bool
    base_path: str

    @classmethod
    def parse(cls, url: str) -> "Target":
        """'http://127.0.0.1:8000', with or without /v1 at the end. Raises ValueError with what is wrong."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address such as http://127.0.0.1:8000")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, path)

    @property
    def host_header(self) -> str:
        """Host and port as HTTP wants them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class _Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._on_piece: OnPiece | None = None
        self._done: asyncio.Future[int] | None = None
        self._arrived = 0.0
        self._has_length = False
        self._has_headers = False
        self.has_answer = False
        """Whether any byte of the present answer has come."""
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is one by its methods, not by inheritance.
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def exchange(self, request: bytes, on_piece: OnPiece) -> "asyncio.Future[int]":
        """Send a request; the future is the status, set when the answer is whole."""
        assert self._transport is not None and (self._done is None or self._done.done())
        self._parser = httptools.HttpResponseParser(self)
        self._on_piece, self._done = on_piece, asyncio.get_running_loop().create_future()
        self._has_length = self._has_headers = self.has_answer = False
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        """Drop the connection, whatever is under way."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def data_received(self, data: bytes) -> None:
        self._arrived, self.has_answer = time.perf_counter(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(TransportError("not HTTP", str(error)))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._has_headers and not self._has_length and error is None:
            self._finish()
        else:
            where = "inside the answer" if self.has_answer else "before the answer"
            self._fail(TransportError("connection lost", f"the connection ended {where}"))

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._has_headers = True

    def on_body(self, body: bytes) -> None:
        if self._on_piece is not None:
            self._on_piece(self._arrived, body)

    def on_message_complete(self) -> None:
        self.is_open = self.is_open and self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._parser.get_status_code())

    def _fail(self, error: TransportError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class StreamingClient:
    """Posts JSON to one server. Connections are kept and used again, the latest first."""

    def __init__(self, target: Target, headers: Mapping[str, str], timeout_seconds: float) -> None:
        self._target, self._timeout = target, timeout_seconds
        fixed = {"host": target.host_header, "content-type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items()).encode()
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, on_piece: OnPiece) -> int:
        """The status of the answer, after `on_piece` saw all of its body. Raises TransportError."""
        start = f"POST {self._target.base_path}{path} HTTP/1.1\r\n".encode()
        request = start + self._head + b"content-length: %d\r\n\r\n" % len(body) + body
        try:
            async with asyncio.timeout(self._timeout):
                return await self._post(request, on_piece)
        except TimeoutError:
            raise TransportError("time-out", f"no whole answer within {self._timeout:g} s") from None

    async def _post(self, request: bytes, on_piece: OnPiece) -> int:
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._exchange(connection, request, on_piece)
            except TransportError:
                # Servers close connections that were idle for a while, which may cross with a request.
                if connection.has_answer:
                    raise
        return await self._exchange(await self._connect(), request, on_piece)

    async def _exchange(self, connection: _Connection, request: bytes, on_piece: OnPiece) -> int:
        try:
            status = await connection.exchange(request, on_piece)
        except (TransportError, asyncio.CancelledError):
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()
        return status

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        target = self._target
        context = ssl.create_default_context() if target.is_tls else None
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, target.host, target.port, ssl=context
            )
        except OSError as error:
            raise TransportError("no connection", str(error)) from None
        return connection

    def close(self) -> None:
        """Drop the kept connections."""
        while self._idle:
            self._idle.pop().close()
