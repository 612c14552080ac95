"""A few kills of the engine under streams of every kind; `kills.py` has the command for many."""

import signal

import pytest

from tests.chaos.kills import Chaos, all_victims, chaos_server
from tests.chaos.mix import image_requests, text_requests

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.mark.parametrize("images", [False, True])
def test_no_stream_notices(images: bool) -> None:
    """Text of an engine alone; pictures by two ranks, of which either or both are killed."""
    requests = image_requests(400) if images else text_requests(60)
    ranks = 2 if images else 1
    with chaos_server(images=images, arguments=("--tensor-parallel-size", str(ranks))) as server:
        report = Chaos(server, requests, seed=3, fault=signal.SIGKILL, victims=all_victims(ranks)).run(3, 0.8)
        metrics = server.metrics()
    assert (report.errors, report.different) == ([], [])
    assert report.kills.keys() == set(all_victims(ranks))
    assert report.kills.total() == metrics["engine_restarts_total"] == 3
    assert metrics["recovery_resumptions_total"] > 0
    assert metrics["recovery_quarantines_total"] == 0
