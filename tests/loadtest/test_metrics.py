"""Definitions on timelines made by hand."""

import random

import numpy as np
import pytest

from loadtest.arrivals import offsets
from loadtest.checks import ClientCost, warnings_of
from loadtest.metrics import Spread, meets, summarize
from loadtest.words import Calibration
from tests.loadtest.helpers import record, settings


def test_times_of_a_request() -> None:
    """Sent at 10.0; text at 10.2, 10.3, 10.5; the finish reason at 10.6; the server counts 5 tokens."""
    made = record(10.0, [10.2, 10.3, 10.5], 10.6, tokens=5)
    assert made.ttft == pytest.approx(0.2)
    assert made.latency == pytest.approx(0.6)
    assert made.tpot == pytest.approx((0.6 - 0.2) / 4)
    assert made.gaps == pytest.approx([0.1, 0.2])


def test_one_token_has_no_time_per_token() -> None:
    made = record(0.0, [0.5], 0.5, tokens=1)
    assert made.tpot is None and made.gaps == []


def test_without_usage_chunks_are_tokens() -> None:
    assert record(0.0, [1.0, 2.0, 3.0], 3.0).num_output_tokens == 3


def test_an_answer_without_text_has_its_first_token_at_the_end() -> None:
    assert record(1.0, [], 1.4, tokens=1).ttft == pytest.approx(0.4)


def test_percentiles_interpolate_in_milliseconds() -> None:
    spread = Spread.of([value / 1000 for value in range(1, 102)])
    assert spread is not None
    assert (spread.mean, spread.p50, spread.p90, spread.p99) == pytest.approx((51, 51, 91, 100))
    two = Spread.of([0.010, 0.020])
    assert two is not None and (two.p50, two.p90, two.p99) == pytest.approx((15, 19, 19.9))
    assert Spread.of([]) is None


def test_throughput_counts_what_succeeded_over_the_whole_level() -> None:
    records = [
        record(0.0, [1.0, 2.0], 2.0, tokens=2),
        record(1.0, [2.0, 3.0, 4.0], 4.0, tokens=3),
        record(0.5, [], 5.0, error="HTTP 429"),
    ]
    metrics = summarize(records, {})
    assert metrics.seconds == pytest.approx(5.0)
    assert metrics.requests_per_second == pytest.approx(2 / 5)
    assert metrics.output_tokens_per_second == pytest.approx(5 / 5)
    assert metrics.total_tokens_per_second == pytest.approx(25 / 5)
    assert metrics.ttft_ms is not None and metrics.ttft_ms.mean == pytest.approx(1000)
    assert (metrics.requests, metrics.succeeded, metrics.errors) == (3, 2, {"HTTP 429": 1})
    assert metrics.cached_share == pytest.approx(0.5)
    assert metrics.goodput is None and metrics.good_share is None


def test_goodput_wants_every_objective_met() -> None:
    """TTFT 100 and 300 ms, TPOT 50 and 10 ms, one failure: each limit excludes another request."""
    records = [
        record(0.0, [0.1, 0.15, 0.2], 0.2, tokens=3),
        record(0.0, [0.3, 0.31, 0.32], 0.32, tokens=3),
        record(0.0, [], 2.0, error="time-out"),
    ]
    assert [meets(one, {"ttft": 200}) for one in records] == [True, False, False]
    assert [meets(one, {"tpot": 20}) for one in records] == [False, True, False]
    assert [meets(one, {"e2e": 250, "ttft": 500}) for one in records] == [True, False, False]
    metrics = summarize(records, {"ttft": 200, "tpot": 60})
    assert metrics.goodput == pytest.approx(1 / 2.0)
    assert metrics.good_share == pytest.approx(1 / 3)


def test_only_failures_have_no_latencies() -> None:
    metrics = summarize([record(0.0, [], 0.0, error="no connection")], {})
    assert (metrics.ttft_ms, metrics.itl_ms, metrics.requests_per_second) == (None, None, 0.0)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_their_name() -> None:
    gaps = np.diff(offsets("poisson", 4.0, 20_001, 8, random.Random(1)))
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.05)
    assert (gaps > 0.25).mean() == pytest.approx(np.exp(-1), abs=0.02)


def test_constant_arrivals_are_even() -> None:
    assert offsets("constant", 4.0, 5, 8, random.Random(1)) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


def test_bursts_come_together_at_the_same_rate() -> None:
    times = offsets("burst", 4.0, 40_003, 4, random.Random(1))
    groups = np.asarray(times[:40_000]).reshape(-1, 4)
    assert len(times) == 40_003
    assert (groups == groups[:, :1]).all()
    assert np.diff(groups[:, 0]).mean() == pytest.approx(4 / 4.0, rel=0.03)


def test_arrivals_follow_the_seed() -> None:
    assert offsets("poisson", 2.0, 9, 8, random.Random("a")) == offsets("poisson", 2.0, 9, 8, random.Random("a"))
    assert offsets("poisson", 2.0, 9, 8, random.Random("a")) != offsets("poisson", 2.0, 9, 8, random.Random("b"))


QUIET = ClientCost(cores=0.1, lag_p50_ms=0.1, lag_p99_ms=1.0, lateness_p99_ms=0.0)


def warnings(client: ClientCost = QUIET, *words: str, **changes: float) -> tuple[str, ...]:
    made = record(0.0, [0.1, 0.12, 0.14], 0.14, tokens=3)
    made.wanted_output_tokens, made.cached_tokens = 3, 0
    for name, value in changes.items():
        setattr(made, name, value)
    calibration = Calibration(tokens_per_word=1.0, overhead=5.0)
    return warnings_of(summarize([made], {}), client, settings(*words), calibration)


def test_a_quiet_client_is_not_warned_about() -> None:
    assert warnings() == ()


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (ClientCost(cores=0.9, lag_p50_ms=0, lag_p99_ms=0, lateness_p99_ms=0), "90% of a core"),
        (ClientCost(cores=0.1, lag_p50_ms=0, lag_p99_ms=5.5, lateness_p99_ms=0), "up to 5.5 ms late"),
        (ClientCost(cores=0.1, lag_p50_ms=0, lag_p99_ms=0, lateness_p99_ms=7), "sent up to 7.0 ms late"),
    ],
)
def test_a_client_that_is_the_bottleneck_says_so(client: ClientCost, said: str) -> None:
    (warning,) = warnings(client)
    assert said in warning


def test_lag_that_is_small_beside_the_latency_is_no_matter() -> None:
    """ITL is 20 ms: a tenth of it is less than the 5 ms that always pass."""
    assert warnings(ClientCost(cores=0.1, lag_p50_ms=0, lag_p99_ms=4.9, lateness_p99_ms=4.9)) == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wanted_output_tokens": 4}, "ended early, after 3.0 of 4.0"),
        ({"cached_tokens": 7}, "70% of the prompts came from the server's prefix cache"),
        ({"has_usage": False, "input_tokens": 0}, "1 answers came without usage"),
        ({"output_tokens": 6}, "chunks held 2.00 tokens"),
    ],
)
def test_a_load_that_is_not_what_it_seems_is_told(changes: dict[str, float], said: str) -> None:
    (warning,) = warnings(QUIET, **changes)
    assert said in warning


def test_prefixes_are_meant_to_be_cached() -> None:
    assert warnings(QUIET, "--workload", "prefix", cached_tokens=9) == ()
