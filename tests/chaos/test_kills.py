"""A few kills of the engine under streams of every kind; `kills.py` has the command for many."""

import signal

import pytest

from tests.chaos.kills import SPECULATION, Chaos
from tests.end_to_end.conftest import run_server

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


def test_no_stream_notices() -> None:
    with run_server("--speculative-config", SPECULATION) as server:
        report = Chaos(server, 60, seed=3, fault=signal.SIGKILL).run(3, 0.8)
        metrics = server.metrics()
    assert (report.errors, report.different) == ([], [])
    assert report.kills == metrics["engine_restarts_total"] == 3
    assert metrics["recovery_resumptions_total"] > 0
    assert metrics["recovery_quarantines_total"] == 0
