"""How near the machine, or the container around the server, is to having no memory left. In the API process and in the
engine: each drops what it only keeps for speed while memory is scarce, and the API process takes no new work while it
is short, before the kernel kills somebody.
"""

import time
from collections.abc import Callable

from model_runtime.host import available_memory
from server.errors import Overloaded

CHECK_SECONDS = 0.5
"""Between two looks: each costs a fifth of a millisecond."""
SCARCE = 2
"""Memory is scarce below so many times what must stay free."""


class MemoryGuard:
    """`min_free` bytes are to stay available; 0 watches nothing."""

    def __init__(
        self,
        min_free: int,
        read: Callable[[], int] = available_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._min_free, self._read, self._clock = min_free, read, clock
        self._next_look = 0.0
        self._available: int | None = None

    def look(self) -> bool:
        """Ask the system, unless it was just asked; whether it was."""
        now = self._clock()
        if not self._min_free or now < self._next_look:
            return False
        self._next_look = now + CHECK_SECONDS
        self._available = self._read()
        return True

    @property
    def is_scarce(self) -> bool:
        """Caches should go."""
        return self._available is not None and self._available < SCARCE * self._min_free

    def require(self) -> None:
        """Raises Overloaded while memory is short."""
        if self._available is not None and self._available < self._min_free:
            raise Overloaded(
                f"the server has {self._available >> 20} MiB of memory left, and min_free_memory is "
                f"{self._min_free >> 20} MiB; try again"
            )
