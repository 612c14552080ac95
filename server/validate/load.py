"""Clients that ask until the time is over, some of which leave early, and the memory of the processes meanwhile.

Used by the soak of `firstlight validate`, and by that of the tests, which also kills engines.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import psutil

from model_runtime.host import anonymous_bytes
from server.validate.memory_slope import Life

CLIENTS = 8
ABORTED = 0.2
"""Share of the requests that the client leaves after some events."""
MOST_EVENTS = 12
"""That a client hears before it leaves."""
MOST_PROBLEMS = 1000
"""That are kept; a soak is ended early by more."""


class Load:
    """`hear` asks request number i to its end, `leave` until after so many events; both say what was wrong, or ''."""

    def __init__(
        self,
        num_requests: int,
        hear: Callable[[int], str],
        leave: Callable[[int, int], str],
        children: Callable[[], Mapping[str, psutil.Process]],
        *,
        seed: int,
        rest: float = 0.0,
    ) -> None:
        """`rest` is how many seconds a client waits after each answer."""
        self._num_requests, self._hear, self._leave, self._children = num_requests, hear, leave, children
        self._seed, self._rest = seed, rest
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.ended = self.aborted = 0
        self.problems: list[str] = []
        self.lives: dict[str, dict[int, Life]] = {}
        """By the process's title, then by its number: an engine may have successors."""
        self.curve: list[tuple[float, str, int]] = []
        """(Seconds, title, anonymous bytes)."""

    def run(self, seconds: float, sample_seconds: float, on_sample: Callable[[float], None]) -> None:
        """Until the time is over; `on_sample` is told the seconds so far."""
        began = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client, number) for number in range(CLIENTS)]
            try:
                while (passed := time.monotonic() - began) < seconds and len(self.problems) < MOST_PROBLEMS:
                    self._over.wait(sample_seconds)
                    self._sample(passed)
                    on_sample(passed)
            finally:
                self._over.set()
            for client in clients:
                client.result()

    def _client(self, number: int) -> None:
        choose = random.Random(self._seed * 1000 + number)
        while not self._over.wait(self._rest):
            index, leaves = choose.randrange(self._num_requests), choose.random() < ABORTED
            try:
                problem = self._leave(index, choose.randrange(MOST_EVENTS)) if leaves else self._hear(index)
            except Exception as error:  # noqa: BLE001 whatever a client meets is to be reported
                problem = f"{type(error).__name__}: {error}"
            with self._lock:
                self.ended += 1
                self.aborted += leaves
                if problem:
                    self.problems.append(problem)

    def _sample(self, seconds: float) -> None:
        """Of each process that is still there when it is looked at."""
        for title, child in self._children().items():
            try:
                size = anonymous_bytes(child.pid)
            except (OSError, ValueError):
                continue
            self.lives.setdefault(title, {}).setdefault(child.pid, Life()).samples.append((self.ended, size))
            self.curve.append((seconds, title, size))
