"""HTTP/1.1 as uvicorn speaks it, with what it leaves open: heads are bounded in size and time, a request that offers to
change to another protocol keeps its body, refusals look like those of the routes, and who does not read is left.

API process; `server/api_process.py` gives it to uvicorn. The limits of bodies are in `server/api/body.py`.
"""

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError, BadRequest, DeadlineExceeded, HeadTooLarge
from server.middleware import error_messages
from server.unread_answer import ReadWatch

MAX_PIPELINED = 16
"""Requests that may wait behind the one being answered while more is read. Who does not read sees no client leave."""

_OFFERS = (b"upgrade", b"http2-settings")
"""Headers of an offer to change the protocol, and their names in Connection: HTTP lets a server pass over it."""


def _without_offer(name: bytes, value: bytes) -> bytes:
    if name == b"connection":
        options = [option.strip() for option in value.split(b",")]
        value = b", ".join(option for option in options if option.lower() not in _OFFERS)
    return b"%b: %b" % (name, value)


def bounded_protocol(max_head_bytes: int, patience: float) -> type[HttpToolsProtocol]:
    """The class of connections whose heads (request line and headers) keep to these limits. `patience` is in seconds:
    for a head to arrive, and for the client to take some more of its answer."""

    class Bounded(BoundedProtocol):
        limit = max_head_bytes
        timeout = patience

    return Bounded


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A head that is too large gets 431; one that does not arrive in time 408, an unused connection is
    closed without a word, and so is one whose client reads next to nothing of its answer for so long."""

    limit: int
    timeout: float
    _head_bytes = 0
    _in_head = True
    _all_head = True
    """The data being read belong to one unfinished head."""
    _timer: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None
    """The request being answered; `cycle` is the newest one, which may wait behind it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.timeout, self._too_slow)
        self._unread = ReadWatch(transport, self.timeout, self._may_write)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._stop_timer()
        self._unread.stop()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called by the event loop when so much is unsent that the answer must wait."""
        super().pause_writing()
        self._unread.begin()

    def _may_write(self) -> bool:
        return self._answered is not None and not self.flow.write_paused and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._unset_keepalive_if_required()
        if self._in_head and self._timer is None:
            self._timer = self.loop.call_later(self.timeout, self._too_slow)
        self._all_head = self._in_head
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(BadRequest("This is not valid HTTP."))
        else:
            if self._all_head:
                self._count(len(data))

    def _feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                if self.transport.is_closing():
                    return
                rest = rest[offer.args[0] :]
                self._pass_over()

    def _pass_over(self) -> None:
        """Read the head again without its offer: the parser takes what follows for the other protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b" % (method, self.url, version)]
        head += [_without_offer(name, value) for name, value in self.headers if name not in _OFFERS]
        self.parser = httptools.HttpRequestParser(self)
        self._in_head = True
        self.parser.feed_data(b"\r\n".join(head) + b"\r\n\r\n")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_head = self._all_head = False
        self._stop_timer()
        if self.parser.get_method() == b"CONNECT":
            self._refuse(BadRequest("This server is no proxy."))
        if self.parser.should_upgrade():
            return
        self._head_bytes = 0
        self._count(len(self.url) + sum(len(name) + len(value) for name, value in self.headers))
        if not self.transport.is_closing():
            super().on_headers_complete()
            if not self.pipeline:
                self._answered = self.cycle
            elif len(self.pipeline) <= MAX_PIPELINED:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Called by a request when its answer is complete."""
        self._answered = self.pipeline[-1][0] if self.pipeline else None
        self._unread.begin()
        super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._in_head, self._head_bytes = True, 0
        if not self.parser.should_upgrade() and not self.transport.is_closing():
            super().on_message_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.limit:
            self._refuse(HeadTooLarge(f"The request's head exceeds the limit of {self.limit} bytes."))

    def _too_slow(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._timer = self.loop.call_later(self.timeout, self._too_slow)
        elif self._head_bytes:
            self._refuse(DeadlineExceeded(f"The request's head did not arrive within {self.timeout:g} s."))
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless an answer to an earlier request is on its way, and close."""
        self._stop_timer()
        if self._answered is None or not self._answered.response_started:
            start, body = error_messages(error, error.body())
            headers = b"".join(b"%b: %b\r\n" % header for header in start["headers"])
            self.transport.write(STATUS_LINE[error.status] + headers + b"connection: close\r\n\r\n" + body["body"])
        self.transport.close()
