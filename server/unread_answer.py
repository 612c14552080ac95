"""A client that does not read: its connection ends when it has taken next to nothing of what was written for it for
some time.

One `ReadWatch` for each connection, kept by `server/http_protocol.py`; API process. Who waits to write to the client,
and what the engine computes for it, then end as if the client had closed the connection.
"""

import asyncio
import fcntl
import logging
import socket
import struct
import sys
import termios
from collections.abc import Callable

logger = logging.getLogger(__name__)

LOOKS = 4
"""In a row with next to no progress, a part of the timeout apart: a process that stood still has looked once, however
long."""
LEAST_RATE = 240
"""Bytes a second, in one look of these at least, or a client that reads a byte now and then would stay for ever. The
slowest mobile networks are ten times as fast."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing drops what the system holds for the client too, instead of offering it for minutes more."""


class ReadWatch:
    """Looks whether the client takes what waits for it, from when the connection is made until `stop`."""

    def __init__(self, transport: asyncio.Transport, timeout: float, may_grow: Callable[[], bool]) -> None:
        """`timeout` in seconds; `may_grow` says whether more can be written at this moment, so that bytes left unsent
        say nothing of the client."""
        self._transport, self._timeout, self._may_grow = transport, timeout, may_grow
        self._loop = asyncio.get_running_loop()
        self._least = LEAST_RATE * timeout / LOOKS
        self._unsent = self._idle_looks = 0
        self._timer = self._loop.call_later(timeout / LOOKS, self._look)

    def stop(self) -> None:
        """The connection is lost."""
        self._timer.cancel()

    def begin(self) -> None:
        """More may have been written up to now: what is unsent is compared from the next look on."""
        self._unsent = 0

    def _look(self) -> None:
        unsent = unsent_bytes(self._transport)
        is_idle = unsent > 0 < self._unsent and self._unsent - unsent < self._least and not self._may_grow()
        self._idle_looks = self._idle_looks + 1 if is_idle else 0
        self._unsent = unsent
        if self._idle_looks < LOOKS:
            self._timer = self._loop.call_later(self._timeout / LOOKS, self._look)
            return
        logger.warning(
            "a client took next to nothing for %g s; its connection ends, %d bytes unsent", self._timeout, unsent
        )
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._transport.abort()


def unsent_bytes(transport: asyncio.Transport) -> int:
    """What was written and the client's system has not taken: bytes held here, and by this system where it tells."""
    held = transport.get_write_buffer_size()
    if sys.platform == "linux":
        answer = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        held += int.from_bytes(answer, sys.byteorder)
    return held
