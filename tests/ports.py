"""Ports that tests name before anybody listens on them."""

import contextlib
import random
import socket

FROM, TO = 20_000, 30_000
"""Below those that a system gives to whoever asks for any: nobody else comes to have them meanwhile."""


def free_port(count: int = 1) -> int:
    """The first of so many in a row on loopback. Raises AssertionError where a hundred tries find none."""
    for port in random.sample(range(FROM, TO), 100):
        with contextlib.suppress(OSError), contextlib.ExitStack() as tried:
            for number in range(port, port + count):
                tried.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port
    raise AssertionError(f"all ports from {FROM} to {TO} seem to be taken")
