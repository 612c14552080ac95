"""The same work is done once for all who want it at the same time. Used by `server/images.py` in the API process."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: "asyncio.Task[T]"
    waiters: int = 0


class SingleFlight(Generic[T]):
    """Work in progress by its key. Failures reach all who wait, and are forgotten with the work."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[T]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    async def run(self, key: Hashable, start: Callable[[], Coroutine[None, None, T]]) -> T:
        """What the work under this key gives; `start` begins it where nobody has. A waiter that is cancelled leaves the
        others alone; the last one takes the work with it."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(start()))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0:
                if self._flights.get(key) is flight:
                    del self._flights[key]
                flight.task.cancel()

    async def aclose(self) -> None:
        """Ends what is in progress; those who wait are cancelled."""
        tasks: list[Awaitable[T]] = []
        for flight in self._flights.values():
            flight.task.cancel()
            tasks.append(flight.task)
        await asyncio.gather(*tasks, return_exceptions=True)
