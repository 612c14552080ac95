"""How much a client must take of what waits for it. The connection is one of which only the counters are looked at."""

import asyncio
import socket

import pytest

from server.unread_answer import LEAST_RATE, LOOKS, ReadWatch

TIMEOUT = 0.2
LEAST = LEAST_RATE * TIMEOUT / LOOKS
"""Bytes between two looks."""
AMOUNT = 10_000


class Connection(asyncio.Transport):
    """Its client takes so many bytes between two looks, over and over."""

    def __init__(self, own: socket.socket, *takes: int) -> None:
        super().__init__({"socket": own})
        self._takes = takes
        self.unsent, self.looks, self.is_aborted = AMOUNT, 0, False

    def get_write_buffer_size(self) -> int:
        self.unsent = max(0, self.unsent - self._takes[self.looks % len(self._takes)])
        self.looks += 1
        return self.unsent

    def abort(self) -> None:
        self.is_aborted = True


def looks_until_abort(*takes: int, may_grow: bool = False, looks: int = 5 * LOOKS) -> int | None:
    """None: it never came."""

    async def watch(connection: Connection) -> None:
        watch = ReadWatch(connection, TIMEOUT, lambda: may_grow)
        while connection.looks < looks and not connection.is_aborted:
            await asyncio.sleep(0.001)
        watch.stop()

    with socket.socket() as own:
        connection = Connection(own, *takes)
        asyncio.run(watch(connection))
    return connection.looks if connection.is_aborted else None


def test_who_takes_a_few_bytes_now_and_then_is_left() -> None:
    few = int(LEAST) - 1
    assert looks_until_abort(0) == looks_until_abort(few) == looks_until_abort(0, 0, 0, 1) == LOOKS + 1


@pytest.mark.parametrize("takes", [(int(LEAST) + 1,), (int(LEAST) + 1, 0, 0, 0), (0, 0, 0, AMOUNT)])
def test_who_is_slow_or_pauses_is_not(takes: tuple[int, ...]) -> None:
    assert looks_until_abort(*takes) is None


def test_nor_is_one_for_whom_more_is_being_written() -> None:
    assert looks_until_abort(0, may_grow=True) is None
