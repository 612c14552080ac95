"""The ranks of another machine are started again, more and more rarely, and not after a fault that stays."""

from pathlib import Path

import pytest

from server import node
from server.child import EXIT_BAD_CONFIGURATION
from server.config import ServeConfig
from server.node import BACKOFF_SECONDS, EARLY_SECONDS, Node


class FakeNode(Node):
    """Each start takes so many seconds and ends with such a code."""

    def __init__(self, runs: list[tuple[float, int]], clock: list[float]) -> None:
        super().__init__(ServeConfig())
        self.runs, self.clock, self.pauses = runs, clock, list[float]()

    def _run_once(self, folder: Path, generation: int) -> int:
        seconds, code = self.runs[generation]
        self.clock[0] += seconds
        return code

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


def test_starts_that_end_early_wait_longer_and_a_refusal_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(node.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(node.signal, "signal", lambda number, handler: None)
    early, late = (1.0, 1), (EARLY_SECONDS, -9)
    ranks = FakeNode([late, *[early] * 7, late, early, (1.0, EXIT_BAD_CONFIGURATION)], clock)
    assert ranks.run() == EXIT_BAD_CONFIGURATION
    first, *others = BACKOFF_SECONDS
    assert ranks.pauses == [first, *others, others[-1], others[-1], first, others[0]]
