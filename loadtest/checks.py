"""What makes figures doubtful: a client that was the bottleneck, or a load that was not what it seems. Pure; used by
`loadtest/runner.py`."""

from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.metrics import Metrics
from loadtest.settings import Settings
from loadtest.words import Calibration

BUSY_CORES = 0.8
"""Of the one core that a Python process can use."""
LATE_SHARE = 0.1
"""Lag over the latency that it adds to."""
LATE_MS = 5.0
"""Lag below this is not worth a word."""
CACHED_SHARE = 0.1
SHORT_SHARE = 0.95
TOKENS_PER_CHUNK = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCost:
    """What the measuring itself took during a level."""

    cores: float
    lag_p50_ms: float
    lag_p99_ms: float
    """How late the event loop wakes up: an error of every time stamp."""
    lateness_p99_ms: float
    """How late requests of an open loop were sent."""


def warnings_of(metrics: Metrics, client: ClientCost, settings: Settings, calibration: Calibration) -> tuple[str, ...]:
    """Sentences for the user; none when the figures can be taken as they are."""
    return (*_client(metrics, client), *_load(metrics, settings, calibration))


def _client(metrics: Metrics, client: ClientCost) -> Iterator[str]:
    if client.cores > BUSY_CORES:
        yield (
            f"the client kept {client.cores:.0%} of a core busy and may be the bottleneck: "
            "load from another machine, or with fewer streams"
        )
    latency = metrics.ttft_ms.p50 if metrics.ttft_ms is not None else 0.0
    if metrics.itl_ms is not None:
        latency = min(latency, metrics.itl_ms.p50)
    if client.lag_p99_ms > max(LATE_MS, LATE_SHARE * latency):
        yield (
            f"the client's event loop was up to {client.lag_p99_ms:.1f} ms late (p99), so single latencies are that "
            "uncertain: leave it a core of its own"
        )
    if client.lateness_p99_ms > max(LATE_MS, LATE_SHARE * latency):
        yield f"requests were sent up to {client.lateness_p99_ms:.1f} ms late (p99): the load was lighter than asked"


def _load(metrics: Metrics, settings: Settings, calibration: Calibration) -> Iterator[str]:
    if metrics.without_usage:
        yield f"{metrics.without_usage} answers came without usage: their chunks were counted as tokens"
    if metrics.succeeded and metrics.mean_output_tokens < SHORT_SHARE * metrics.wanted_output_tokens:
        advice = "the server seems to ignore --ignore-eos" if settings.ignore_eos else "--ignore-eos asks for all"
        yield (
            f"answers ended early, after {metrics.mean_output_tokens:.1f} of {metrics.wanted_output_tokens:.1f}: "
            f"{advice}"
        )
    # What the chat template writes is the same in every prompt.
    template_share = calibration.overhead / max(1.0, metrics.mean_input_tokens)
    if settings.shape.workload in ("text", "images") and metrics.cached_share > template_share + CACHED_SHARE:
        yield (
            f"{metrics.cached_share:.0%} of the prompts came from the server's prefix cache although none is shared: "
            "it has seen them before, take another --seed"
        )
    if metrics.tokens_per_chunk > TOKENS_PER_CHUNK:
        yield f"chunks held {metrics.tokens_per_chunk:.2f} tokens: ITL is the time between chunks, TPOT is per token"
