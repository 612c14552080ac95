"""What is known of the engine of one replica: which generation there is, whether it is ready, when it was last heard.

Kept by `server/client.py`, one for each replica; API process.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

import zmq

from model_runtime.config import RuntimeInfo
from server import wire
from server.engine_socket import EngineSocket

logger = logging.getLogger(__name__)

NOWHERE = -1
"""In place of an engine's generation: there is none."""
MAX_UNHEARD_BYTES = 64 * 1024 * 1024
"""Of messages (without pixels) to an engine since it last spoke, which may pile up while it computes; then it gets no
more, and requests are refused where there is no other."""
QUIET_SECONDS = 2.0
"""Without a word, after which others get what is new, if there are others: long steps are silent too, so it is not
unready for that."""


class EngineLink:
    """The newest engine of a replica."""

    def __init__(self, socket: EngineSocket, replica: int, stall_timeout: float) -> None:
        self._socket, self.replica, self._stall_timeout = socket, replica, stall_timeout
        self.generation = NOWHERE
        """Of the engine that is there; NOWHERE before the first and between two."""
        self.newest_ready = NOWHERE
        """Of the newest engine that was ready."""
        self.newest_down = NOWHERE
        """The newest generation that is known to have ended."""
        self.info: RuntimeInfo | None = None
        """Of the newest engine that was ready; None before the first."""
        self.stats: wire.Stats | None = None
        """The newest of the engine that is there."""
        self.newest_start: wire.Hello | wire.Loading = wire.Loading(0, "starting", 0.0, replica)
        self._down_reason = "the model is loading"
        self._last_sign_of_life = 0.0
        self._unheard_bytes = 0

    @property
    def is_there(self) -> bool:
        """There is an engine that can be sent something."""
        return self.generation != NOWHERE

    @property
    def is_coming(self) -> bool:
        """There is none, and the next one can be expected soon: the last start, if there was one, has not failed."""
        return not self.is_there and self.newest_down <= self.newest_ready

    @property
    def is_attentive(self) -> bool:
        """It reads what it is sent, as far as is known."""
        return self._unheard_bytes <= MAX_UNHEARD_BYTES

    @property
    def is_quiet(self) -> bool:
        """Nothing was heard of it for a while."""
        return self._silence > QUIET_SECONDS

    @property
    def _silence(self) -> float:
        return time.monotonic() - self._last_sign_of_life

    def unready_reason(self) -> str | None:
        """Why a request would not run now; None when it would."""
        if self.is_there:
            silence = self._silence
            is_silent = silence > self._stall_timeout
            return f"the engine has given no sign of life for {silence:.0f} s" if is_silent else None
        if isinstance(self.newest_start, wire.Loading):
            return f"{self._down_reason} ({self.newest_start.stage}, {self.newest_start.fraction:.0%})"
        return self._down_reason

    def send(self, message: wire.ToEngine, pixels: Sequence[bytes | memoryview] = ()) -> None:
        """To the engine that is there; to none, nothing is sent."""
        if not self.is_there:
            return
        frame = wire.encode(message)
        self._unheard_bytes += len(frame)
        self._socket.send(self.generation, frame, pixels).add_done_callback(partial(self._on_sent, self.generation))

    def _on_sent(self, generation: int, future: "asyncio.Future[zmq.MessageTracker | None]") -> None:
        """The supervisor will say what became of an engine that cannot be reached."""
        if not future.cancelled() and (error := future.exception()) is not None and generation == self.generation:
            logger.warning("the engine cannot be reached: %s", error)
            self.lose(f"the engine cannot be reached: {error}")

    def start(self, message: wire.Hello | wire.Loading) -> None:
        """An engine starts, or is ready. Raises WireError for one of another version."""
        self._last_sign_of_life = time.monotonic()
        self.newest_start = message
        if isinstance(message, wire.Hello):
            if message.version != wire.WIRE_VERSION:
                raise wire.WireError(f"the engine speaks wire version {message.version}, not {wire.WIRE_VERSION}")
            self.generation = self.newest_ready = message.generation
            self.info, self.stats = message.info, message.stats

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
