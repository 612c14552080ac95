"""The API process's ZeroMQ socket, to which the engines and the supervisor connect; their identities tell them apart.

Made by `server/api_process.py`, read by `server/client.py`, written through `engine_link.py`; API process.
"""

import asyncio
from collections.abc import Sequence

import zmq
import zmq.asyncio

from server import wire


def bind(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    """The socket of an EngineSocket. Its queue is not limited in messages: what does not fit would be lost."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(address)
    return router


class EngineSocket:
    """A bound ROUTER socket, in messages."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def receive(self, timeout_ms: int | None) -> tuple[bytes, wire.ToApi | wire.WireError] | None:
        """(identity, message) of whoever sent one, or what is wrong with it; None after the time, which None does not
        limit."""
        if timeout_ms is not None and not await self._socket.poll(timeout_ms):
            return None
        identity, *frames = await self._socket.recv_multipart()
        try:
            return identity, wire.decode_to_api(b"".join(frames))
        except wire.WireError as error:
            return identity, error

    async def tell_supervisor(self, message: wire.ToSupervisor) -> None:
        """It must have connected."""
        await self._socket.send_multipart([wire.SUPERVISOR, wire.encode(message)])

    def send(
        self, generation: int, frame: bytes, pixels: Sequence[bytes | memoryview]
    ) -> "asyncio.Future[zmq.MessageTracker | None]":
        """To an engine; the future fails where it cannot be reached."""
        frames = [wire.engine_identity(generation), frame, *pixels]
        return asyncio.ensure_future(self._socket.send_multipart(frames, copy=not pixels))
