"""A server under mixed load of text and images for minutes: clients that leave, engines that are killed, and what is to
come of it: every answer right, nothing left, and no memory that grows with requests.

`python -m tests.chaos.soak --minutes 30` prints a report; it fails where there is something to report. `test_soak.py`
has a minute and a half of it in the suite.
"""

import argparse
import signal
import sys

from server.validate.load import Load
from server.validate.memory_slope import slope
from server.validate.soak import MOST_GROWTH
from tests.chaos.kills import chaos_server
from tests.chaos.mix import Heard, image_requests, listen
from tests.end_to_end.conftest import Server, sse_events

SAMPLE_SECONDS = 2.0
SMALL = ("--memory-budget", "192MiB", "--encoder-cache-bytes", "4MiB", "--max-num-seqs", "16")
"""Pools that are full soon: what grows after that is a leak."""


class Soak:
    """The load on one server."""

    def __init__(self, server: Server, seed: int, rest: float = 0.0) -> None:
        """`rest` is how many seconds a client waits after each answer."""
        self._server = server
        self._requests = [request for tokens in (8, 40, 120) for request in image_requests(tokens)]
        self._right: list[Heard] = []
        self.load = Load(len(self._requests), self._hear, self._leave, server.children, seed=seed, rest=rest)
        self.kills = 0

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

    def run(self, seconds: float, kill_seconds: float) -> None:
        """Load until the time is over, then see what is left."""
        self._right = [listen(self._server, request, lambda: None, timeout=600) for request in self._requests]
        assert not any(heard.error for heard in self._right), self._right

        def kill(passed: float) -> None:
            engine = self._server.children().get("engine")
            if engine is not None and passed > kill_seconds * (self.kills + 1):
                engine.send_signal(signal.SIGKILL)
                self.kills += 1

        self.load.run(seconds, SAMPLE_SECONDS, kill)
        self._server.wait_for(self._server.is_idle, 30, "idleness")
        if (restarts := self._server.metrics()["engine_restarts_total"]) != self.kills:
            problem = f"{restarts} engines were lost, {self.kills} were killed: others broke an invariant"
            self.load.problems.append(problem)

    def report(self) -> bool:
        """Print it; whether all is well."""
        load = self.load
        slopes = {title: slope(list(load.lives[title].values())) for title in ("api", "engine")}
        print(f"{load.ended} requests, {load.aborted} left early, {self.kills} kills: {len(load.problems)} wrong")
        for title, growth in slopes.items():
            print(f"{title}: {growth / 1024:+.2f} KB of anonymous memory for each request after warm-up")
            for pid, life in load.lives[title].items():
                sizes = [round(size / 2**20) for _, size in life.samples[:: max(1, len(life.samples) // 12)]]
                print(f"  {pid}: {sizes} MiB")
        for problem in load.problems[:20]:
            print(problem[:1000])
        return not load.problems and max(slopes.values()) < MOST_GROWTH


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
