"""A server under mixed load of text and images for minutes: clients that leave, engines that are killed, and what is to
come of it: every answer right, nothing left, and no memory that grows with requests.

`python -m tests.chaos.soak --minutes 30` prints a report; it fails where there is something to report. `test_soak.py`
has a minute and a half of it in the suite.
"""

import argparse
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from tests.chaos.kills import chaos_server
from tests.chaos.mix import Heard, image_requests, listen
from tests.end_to_end.conftest import Server, sse_events

CLIENTS = 8
ABORTED = 0.2
"""Share of the streams that the client leaves after some events."""
SAMPLE_SECONDS = 2.0
LEAST_SAMPLES = 8
"""Of a process, for a slope."""
MOST_GROWTH = 2048.0
"""Bytes of anonymous memory for each request, after the warm-up."""
SMALL = ("--memory-budget", "192MiB", "--encoder-cache-bytes", "4MiB", "--max-num-seqs", "16")
"""Pools that are full soon: what grows after that is a leak."""


@dataclass
class Life:
    """A process: (requests that had ended, anonymous bytes) every SAMPLE_SECONDS."""

    samples: list[tuple[int, int]] = field(default_factory=list)

    def warm(self) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
        """Without the first third, in which pools and heaps fill, as differences from the mean: [N, 2]."""
        later = np.array(self.samples[len(self.samples) // 3 :], dtype=np.float64).reshape(-1, 2)
        return later - later.mean(axis=0) if len(later) else later


def slope(lives: list[Life]) -> float:
    """Bytes for each request: the line through the warm samples of all lives, each from its own level."""
    points = np.concatenate([life.warm() for life in lives if len(life.samples) >= LEAST_SAMPLES] or [np.zeros((0, 2))])
    spread = float((points[:, 0] ** 2).sum())
    return float((points[:, 0] * points[:, 1]).sum()) / spread if spread else 0.0


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is no file's."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("smaps_rollup has no line 'Anonymous:'")


class Soak:
    """The load on one server."""

    def __init__(self, server: Server, seed: int, rest: float = 0.0) -> None:
        """`rest` is how many seconds a client waits after each answer."""
        self._server, self._seed, self._rest = server, seed, rest
        self._requests = [request for tokens in (8, 40, 120) for request in image_requests(tokens)]
        self._right: list[Heard] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.ended = self.aborted = self.kills = 0
        self.problems: list[str] = []
        self.api, self.engines = Life(), dict[int, Life]()

    def _client(self, number: int) -> None:
        choose = random.Random(self._seed * 1000 + number)
        while not self._over.wait(self._rest):
            index = choose.randrange(len(self._requests))
            leaves = choose.random() < ABORTED
            try:
                problem = self._leave(index, choose.randrange(12)) if leaves else self._hear(index)
            except Exception as error:  # noqa: BLE001 whatever a client meets is to be reported
                problem = f"{type(error).__name__}: {error}"
            with self._lock:
                self.ended += 1
                self.aborted += leaves
                if problem:
                    self.problems.append(problem)

    def _hear(self, index: int) -> str:
        heard = listen(self._server, self._requests[index], lambda: None, timeout=600)
        return "" if heard == self._right[index] else f"{self._requests[index][1]}: {heard}, not {self._right[index]}"

    def _leave(self, index: int, events: int) -> str:
        """After so many events, or before the first."""
        path, body = self._requests[index]
        body = {"model": self._server.model, "stream": True, **body}
        with self._server.http.stream("POST", path, json=body, timeout=600) as response:
            if response.status_code != 200:
                return response.read().decode()
            for _ in zip(range(events), sse_events(response.iter_lines()), strict=False):
                pass
        return ""

    def _sample(self) -> None:
        for name, child in self._server.children().items():
            life = (
                self.api if name == "api" else self.engines.setdefault(child.pid, Life()) if name == "engine" else None
            )
            if life is not None:
                try:
                    life.samples.append((self.ended, anonymous_bytes(child.pid)))
                except (OSError, psutil.Error, AssertionError):
                    print(f"{name} ended while it was looked at", file=sys.stderr)

    def _kill(self) -> None:
        engine = self._server.children().get("engine")
        if engine is not None:
            engine.send_signal(signal.SIGKILL)
            self.kills += 1

    def run(self, seconds: float, kill_seconds: float) -> None:
        """Load until the time is over, then see what is left."""
        self._right = [listen(self._server, request, lambda: None, timeout=600) for request in self._requests]
        assert not any(heard.error for heard in self._right), self._right
        began = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client, number) for number in range(CLIENTS)]
            next_kill = began + kill_seconds
            while time.monotonic() < began + seconds:
                time.sleep(SAMPLE_SECONDS)
                self._sample()
                if time.monotonic() > next_kill:
                    self._kill()
                    next_kill += kill_seconds
            self._over.set()
            for client in clients:
                client.result()
        self._server.wait_for(self._server.is_idle, 30, "idleness")
        if (restarts := self._server.metrics()["engine_restarts_total"]) != self.kills:
            self.problems.append(f"{restarts} engines were lost, {self.kills} were killed: others broke an invariant")

    def report(self) -> bool:
        """Print it; whether all is well."""
        slopes = {"API process": slope([self.api]), "engine": slope(list(self.engines.values()))}
        print(
            f"{self.ended} requests, {self.aborted} left by the client, {self.kills} kills: {len(self.problems)} wrong"
        )
        for name, growth in slopes.items():
            print(f"{name}: {growth / 1024:+.2f} KB of anonymous memory for each request after warm-up")
        for name, life in {
            "API process": self.api,
            **{f"engine {pid}": one for pid, one in self.engines.items()},
        }.items():
            print(
                f"  {name}: {[round(size / 2**20) for _, size in life.samples[:: max(1, len(life.samples) // 12)]]} MiB"
            )
        for problem in self.problems[:20]:
            print(problem[:1000])
        return not self.problems and max(slopes.values()) < MOST_GROWTH


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with chaos_server(images=True, arguments=SMALL) as server:
        soak = Soak(server, given.seed)
        soak.run(given.minutes * 60, given.kill_seconds)
        return 0 if soak.report() else 1


if __name__ == "__main__":
    sys.exit(main())
