"""The line that the soak draws through samples of memory."""

import pytest

from tests.chaos.soak import LEAST_SAMPLES, Life, slope


def test_growth_is_that_of_warm_processes() -> None:
    """Each from its own level; what grows in the first third is warm-up, and a life of a few samples says nothing."""
    leaks = [Life([(10 * step, level + 3000 * 10 * step) for step in range(30)]) for level in (0, 10**9)]
    assert slope(leaks) == pytest.approx(3000)
    warms_up = Life([(step, min(step, 10) * 2**20) for step in range(30)])
    assert slope([warms_up]) == pytest.approx(0)
    short = Life([(step, step * 10**9) for step in range(LEAST_SAMPLES - 1)])
    assert slope([*leaks, short]) == pytest.approx(3000)
    assert slope([short]) == slope([]) == 0.0
