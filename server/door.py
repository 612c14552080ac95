"""The door of the generation routes: a place in the queue for each request, or an answer at once that there is none.

Pure ASGI, installed by `server/app.py` behind authentication; API process. In a burst, requests without a place must
not wait for the work on those that have one: refusing takes no route, and the admitted requests begin one by one, when
nobody knocks any more.
"""

import asyncio
from collections import deque
from collections.abc import Container

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError
from server.generation import Engine
from server.middleware import error_response_messages

MAX_WAIT = 0.1
"""Seconds that an admitted request may wait for others to be refused."""


class Door:
    """Admits the POST requests to `paths`. The route finds its admission in the scope's state, under 'admission'."""

    def __init__(self, app: ASGIApp, engine: Engine, paths: Container[str]) -> None:
        self._app, self._engine, self._paths = app, engine, paths
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        self._turns.arrive()
        try:
            admission = self._engine.admit()
        except ApiError as error:
            for message in error_response_messages(error, scope):
                await send(message)
            return
        scope["state"]["admission"] = admission
        try:
            await self._turns.take()
            await self._app(scope, receive, send)
        finally:
            admission.release()


class Turns:
    """Lets one waiter go on in each pass of the event loop, first come, first served, while no more arrive.

    The event loop accepts one connection in each pass, so a burst arrives over as many passes as it has connections.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[None], float]] = deque()
        self._arrived = False

    def arrive(self) -> None:
        """Somebody is at the door, whether admitted or not."""
        self._arrived = True

    async def take(self) -> None:
        """Wait for a turn, at most MAX_WAIT seconds behind those that go on arriving."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append((turn, loop.time() + MAX_WAIT))
        if len(self._waiting) == 1:
            loop.call_soon(self._give, loop)
        await turn

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        arrived, self._arrived = self._arrived, False
        turn, latest = self._waiting[0]
        if turn.cancelled() or not arrived or loop.time() >= latest:
            self._waiting.popleft()
            if not turn.cancelled():
                turn.set_result(None)
        if self._waiting:
            loop.call_soon(self._give, loop)
