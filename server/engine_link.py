"""The API process's ZeroMQ socket, and what is known of the engine behind it: which generation there is, whether it is
ready, when it was last heard.

Owned by `server/client.py`; API process. The engine process and the supervisor connect to the socket; their identities
tell them apart.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

import zmq
import zmq.asyncio

from model_runtime.config import RuntimeInfo
from server import wire
from server.errors import Overloaded

logger = logging.getLogger(__name__)

NOWHERE = -1
"""In place of an engine's generation: there is none."""
MAX_UNHEARD_BYTES = 64 * 1024 * 1024
"""Of messages (without pixels) to an engine since it last spoke, which may pile up while it computes; then requests are
refused."""


def bind(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    """The socket of an EngineLink. Its queue is not limited in messages: what does not fit would be lost."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(address)
    return router


class EngineNonsense(Exception):
    """The engine that is there sent a frame that does not decode."""


class EngineLink:
    """A bound ROUTER socket and the newest engine."""

    def __init__(self, socket: zmq.asyncio.Socket, stall_timeout: float) -> None:
        self._socket, self._stall_timeout = socket, stall_timeout
        self.generation = NOWHERE
        """Of the engine that is there; NOWHERE before the first and between two."""
        self.newest_down = NOWHERE
        """The newest generation that is known to have ended."""
        self.info: RuntimeInfo | None = None
        """Of the newest engine that was ready; None before the first."""
        self.stats: wire.Stats | None = None
        """The newest of the engine that is there."""
        self.newest_start: wire.Hello | wire.Loading = wire.Loading(0, "starting", 0.0)
        self._down_reason = "the model is loading"
        self._last_sign_of_life = 0.0
        self._unheard_bytes = 0

    def unready_reason(self) -> str | None:
        """Why a request would not run now; None when it would."""
        if self.generation != NOWHERE:
            silence = time.monotonic() - self._last_sign_of_life
            is_silent = silence > self._stall_timeout
            return f"the engine has given no sign of life for {silence:.0f} s" if is_silent else None
        if isinstance(self.newest_start, wire.Loading):
            return f"{self._down_reason} ({self.newest_start.stage}, {self.newest_start.fraction:.0%})"
        return self._down_reason

    def require_attention(self) -> None:
        """Raises Overloaded while the engine has much to read."""
        if self._unheard_bytes > MAX_UNHEARD_BYTES:
            raise Overloaded("the engine has not caught up with the requests that it was sent; try again")

    def send(self, message: wire.ToEngine, pixels: Sequence[bytes | memoryview] = ()) -> None:
        """To the engine that is there; to none, nothing is sent."""
        if self.generation == NOWHERE:
            return
        frame = wire.encode(message)
        self._unheard_bytes += len(frame)
        frames = [wire.engine_identity(self.generation), frame, *pixels]
        future = asyncio.ensure_future(self._socket.send_multipart(frames, copy=not pixels))
        future.add_done_callback(partial(self._on_sent, self.generation))

    def _on_sent(self, generation: int, future: "asyncio.Future[zmq.MessageTracker | None]") -> None:
        """The supervisor will say what became of an engine that cannot be reached."""
        if not future.cancelled() and (error := future.exception()) is not None and generation == self.generation:
            logger.warning("the engine cannot be reached: %s", error)
            self.lose(f"the engine cannot be reached: {error}")

    async def tell_supervisor(self, message: wire.ToSupervisor) -> None:
        """It must have connected."""
        await self._socket.send_multipart([wire.SUPERVISOR, wire.encode(message)])

    async def receive(self, timeout_ms: int) -> tuple[bytes, wire.ToApi] | None:
        """(identity, message) of a process of this server, or None: a stranger's, or nothing within the time. Raises
        EngineNonsense, and WireError for nonsense of the supervisor."""
        if self.generation == NOWHERE and not await self._socket.poll(timeout_ms):
            return None
        identity, *frames = await self._socket.recv_multipart()
        try:
            message = wire.decode_to_api(b"".join(frames))
        except wire.WireError as error:
            if identity == wire.SUPERVISOR:
                raise
            if identity == wire.engine_identity(self.generation):
                raise EngineNonsense(str(error)) from None
            logger.warning("%r is no process of this server; dropped what it sent: %s", identity, error)
            return None
        return identity, message

    def start(self, message: wire.Hello | wire.Loading) -> None:
        """An engine starts, or is ready. Raises WireError for one of another version."""
        self._last_sign_of_life = time.monotonic()
        self.newest_start = message
        if isinstance(message, wire.Hello):
            if message.version != wire.WIRE_VERSION:
                raise wire.WireError(f"the engine speaks wire version {message.version}, not {wire.WIRE_VERSION}")
            self.generation, self.info, self.stats = message.generation, message.info, message.stats

    def hear(self, message: wire.ToApi) -> None:
        """The engine that is there spoke."""
        self._last_sign_of_life, self._unheard_bytes = time.monotonic(), 0
        if isinstance(message, wire.Events):
            self.stats = message.stats
        elif isinstance(message, wire.Stats):
            self.stats = message

    def lose(self, reason: str) -> None:
        """No engine from now on."""
        self.generation, self.stats, self._down_reason, self._unheard_bytes = NOWHERE, None, reason, 0
