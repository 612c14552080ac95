"""Engines killed at random moments under 16 streams, whose texts must be those of an undisturbed run.

`python -m tests.chaos.kills --kills 100 [--signal STOP] [--images] [--ranks 2] [--stages 2] [--sharers 2]
[--replicas 2]` prints a
report.
`test_kills.py` does a few in the suite.
"""

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from server.tiny_vlm import write_tiny_vlm
from tests.chaos.mix import Heard, Request, image_requests, listen, text_requests
from tests.end_to_end.conftest import BUFFERED_SECONDS, Server, run_server

SPECULATION = '{"method": "ngram", "num_speculative_tokens": 8}'
REQUEST_SECONDS = 3600.0
"""On a busy machine a hundred pauses are long."""
ANSWER_SECONDS = 240.0
"""Of a request that is no stream: three engines may be lost before it has its answer."""
Victims = tuple[str, ...]
"""Processes that are killed at once."""


def all_victims(ranks: int, replicas: int = 1) -> tuple[Victims, ...]:
    """Each process of the engine alone, and all together; where there are replicas, their engines."""
    names: Victims = ("engine", *(f"rank {rank}" for rank in range(1, ranks)))
    if replicas > 1:
        names = tuple(f"engine of replica {replica}" for replica in range(replicas))
    return (*((name,) for name in names), names) if len(names) > 1 else (names,)


@dataclass
class Report:
    """Of all rounds."""

    kills: Counter[Victims] = field(default_factory=Counter)
    streams: int = 0
    errors: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """Seconds from a kill to the first event behind it."""


class Chaos:
    """A server, and whoever kills its engine."""

    def __init__(
        self,
        server: Server,
        requests: list[Request],
        seed: int,
        fault: signal.Signals,
        victims: tuple[Victims, ...] = (("engine",),),
    ) -> None:
        """`victims` take turns."""
        self._server, self._requests, self._fault, self._victims = server, requests, fault, victims
        self._random = random.Random(seed)
        self._arrivals: list[float] = []
        self._done = threading.Event()
        self.report = Report()

    def _listen(self, request: Request) -> Heard:
        return listen(self._server, request, lambda: self._arrivals.append(time.monotonic()), REQUEST_SECONDS)

    def round(self) -> list[Heard]:
        """All requests at once."""
        with ThreadPoolExecutor(len(self._requests)) as pool:
            return list(pool.map(self._listen, self._requests))

    def _kill_until_done(self, most: int, spread: float) -> None:
        """Also while an engine is starting, but where there are several only when all are there. Not when all is
        computed: clients may still be reading what a fast machine has long said."""
        while self.report.kills.total() < most and not self._done.wait(self._random.uniform(0.05, spread)):
            names = self._victims[self.report.kills.total() % len(self._victims)]
            others = self._server.progress().get("replicas", [])
            if any(one["status"] == "no engine" for one in others):
                continue
            victims = self._server.stop_at_work(*names)
            killed_at = time.monotonic()
            if hit := tuple(name for name, victim in victims.items() if self._hit(victim)):
                self.report.kills[hit] += 1
                self._wait_for_event(killed_at)

    def _hit(self, victim: psutil.Process) -> bool:
        """Whether it was still there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(self._fault)
            return True
        return False

    def _wait_for_event(self, killed_at: float) -> None:
        while not self._done.wait(0.02):
            if self._arrivals[-1] > killed_at + BUFFERED_SECONDS:
                later = next(at for at in reversed(self._arrivals) if at <= killed_at + BUFFERED_SECONDS)
                first = self._arrivals[self._arrivals.index(later) + 1]
                self.report.pauses.append(first - killed_at)
                return

    def run(self, kills: int, spread: float) -> Report:
        """One undisturbed round, then rounds until the engine was killed so often."""
        undisturbed = self.round()
        assert not any(heard.error for heard in undisturbed), undisturbed
        while self.report.kills.total() < kills:
            self._done.clear()
            killer = threading.Thread(target=self._kill_until_done, args=(kills, spread))
            killer.start()
            for (path, body), before, after in zip(self._requests, undisturbed, self.round(), strict=True):
                self.report.streams += 1
                if after.error:
                    self.report.errors.append(after.error)
                elif after != before:
                    self.report.different.append(f"{path} {body}: {before} became {after}")
            self._done.set()
            killer.join()
        return self.report


@contextlib.contextmanager
def chaos_server(*, images: bool, arguments: tuple[str, ...] = ()) -> Iterator[Server]:
    """The embedded model, or a tiny one that takes images."""
    arguments = ("--request-timeout", str(REQUEST_SECONDS), *arguments)
    if "--pipeline-parallel-size" not in arguments:  # steps with drafts are not in flight together
        arguments = ("--speculative-config", SPECULATION, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        if images:
            write_tiny_vlm(Path(folder) / "tiny-vlm")
        with run_server(*arguments, model=f"{folder}/tiny-vlm" if images else "embedded") as server:
            server.http.timeout = ANSWER_SECONDS
            yield server


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--spread", type=float, default=3.0, help="most seconds from going on to the next kill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--images", action="store_true", help="ask a tiny model with random weights about pictures")
    parser.add_argument("--ranks", type=int, default=1, help="of which one or all are killed")
    parser.add_argument("--stages", type=int, default=1, help="each with so many ranks")
    parser.add_argument("--sharers", type=int, default=1, help="of the sequences, each so many ranks")
    parser.add_argument(
        "--replicas", type=int, default=1, help="whose engines are killed, one or all; not with --ranks"
    )
    parser.add_argument("--stall-timeout", default="15")
    given = parser.parse_args()
    requests = image_requests(given.max_tokens) if given.images else text_requests(given.max_tokens)
    sizes = ("--tensor-parallel-size", str(given.ranks), "--data-parallel-size", str(given.replicas))
    if given.sharers > 1:
        sizes += ("--context-parallel-size", str(given.sharers))
    if given.stages > 1:
        sizes += ("--pipeline-parallel-size", str(given.stages))
    arguments = ("--stall-timeout", given.stall_timeout, *sizes)
    with chaos_server(images=given.images, arguments=arguments) as server:
        fault = signal.Signals["SIG" + given.signal]
        report = Chaos(
            server, requests, given.seed, fault, all_victims(given.ranks * given.stages * given.sharers, given.replicas)
        ).run(given.kills, given.spread)
        metrics = server.metrics()
    _show(report, metrics)
    sys.exit(1 if report.errors or report.different else 0)


def _show(report: Report, metrics: dict[str, float]) -> None:
    killed = ", ".join(f"{' and '.join(names)} {count}" for names, count in sorted(report.kills.items()))
    print(f"{report.kills.total()} kills ({killed}), {report.streams} streams: ", end="")
    print(f"{len(report.errors)} errors, {len(report.different)} differ")
    if pauses := sorted(report.pauses):
        p50, p95 = (pauses[int(len(pauses) * share)] for share in (0.5, 0.95))
        print(f"pause p50 {p50:.2f} s, p95 {p95:.2f} s, longest {pauses[-1]:.2f} s, of {len(pauses)}")
    print({name: value for name, value in metrics.items() if name.startswith(("recovery", "engine_restarts"))})
    for problem in report.errors + report.different:
        print(problem[:2000])


if __name__ == "__main__":
    main()
