"""How many bytes of request bodies are held at the same time: a bound for all of them together.

Pure ASGI, installed by `server/app.py` behind the door; API process. A body with images is megabytes, and it waits for
its turn at the decoder. It is counted while it arrives, and until the route says that it is used up or the request
ends.
"""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import Overloaded

SMALL = 64 * 1024
"""Bytes of each body that are not counted, so that small requests go on while large ones have taken everything."""


class HeldBody:
    """What is counted of one request's body."""

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget, self._size, self._counted = budget, 0, 0

    def grow(self, size: int) -> None:
        """So many bytes have arrived. Raises Overloaded; a body that is alone fits while the machine has memory."""
        self._size += size
        more = max(self._size - SMALL, 0) - self._counted
        if more > 0:
            self._budget.require_room(more, self._counted)
            self._counted += more
            self._budget.num_bytes += more

    def release(self) -> None:
        """The body is held no more. Idempotent."""
        self._budget.num_bytes -= self._counted
        self._size = self._counted = 0


class BodyBudget:
    """Gives each request a `HeldBody`; the route finds it in the scope's state, under 'held_body'."""

    def __init__(self, app: ASGIApp, limit: int, require_memory: Callable[[], None]) -> None:
        """`require_memory` raises Overloaded while the machine has too little."""
        self._app, self._limit, self._require_memory = app, limit, require_memory
        self.num_bytes = 0
        """Counted now, of all requests."""

    def require_room(self, more: int, own: int) -> None:
        """Raises Overloaded when a request that holds `own` bytes cannot have more."""
        self._require_memory()
        others = self.num_bytes - own
        if others > 0 and self.num_bytes + more > self._limit:
            raise Overloaded(f"the bodies of other requests have {others} bytes, which leaves no room for this one")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = scope["state"]["held_body"] = HeldBody(self)

        async def counted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                held.grow(len(message.get("body", b"")))
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            held.release()
