"""A minute and a half of the soak, and the line that it draws through samples of memory."""

import pytest

from server.validate.memory_slope import LEAST_SAMPLES, Life, slope
from tests.chaos.kills import chaos_server
from tests.chaos.soak import SMALL, Soak

REST_SECONDS = 0.6
"""For each client after each answer: the rest of the suite computes meanwhile."""


def test_growth_is_that_of_warm_processes() -> None:
    """Each from its own level; what grows in the first third is warm-up, and a life of a few samples says nothing."""
    leaks = [Life([(10 * step, level + 3000 * 10 * step) for step in range(30)]) for level in (0, 10**9)]
    assert slope(leaks) == pytest.approx(3000)
    warms_up = Life([(step, min(step, 10) * 2**20) for step in range(30)])
    assert slope([warms_up]) == pytest.approx(0)
    short = Life([(step, step * 10**9) for step in range(LEAST_SAMPLES - 1)])
    assert slope([*leaks, short]) == pytest.approx(3000)
    assert slope([short]) == slope([]) == 0.0


@pytest.mark.timeout(300)
def test_a_minute_and_a_half() -> None:
    """With two kills. A leak of 8 KB for each request in either process fails it, and so does a wrong token."""
    with chaos_server(images=True, arguments=SMALL) as server:
        soak = Soak(server, seed=1, rest=REST_SECONDS)
        soak.run(seconds=90, kill_seconds=38)
        well = soak.report()
    assert well
    assert soak.kills == 2
    assert soak.load.ended > 200 and soak.load.aborted > 20
