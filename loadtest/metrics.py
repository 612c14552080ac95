"""From records to figures: percentiles, throughput, goodput, errors by kind. Pure; used by `loadtest/runner.py`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution, in milliseconds. Percentiles interpolate linearly between the two nearest ranks."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread | None":
        """None where there is nothing to measure."""
        if not seconds:
            return None
        milliseconds = np.asarray(seconds, dtype=np.float64) * 1e3
        p50, p90, p99 = np.percentile(milliseconds, (50, 90, 99))
        return cls(mean=float(milliseconds.mean()), p50=float(p50), p90=float(p90), p99=float(p99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What one level of load measured. Latencies are of the requests that succeeded."""

    requests: int
    succeeded: int
    errors: dict[str, int]
    """Failed requests by kind."""
    error_examples: dict[str, str]
    """The first message of each kind."""
    seconds: float
    """From the first start to the last end."""
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    """Prompts and answers."""
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    goodput: float | None
    """Requests per second that met every objective; None where no objective was set."""
    good_share: float | None
    """Of all requests, failed ones included."""
    mean_input_tokens: float
    mean_output_tokens: float
    wanted_output_tokens: float
    cached_share: float
    """Of the prompts' tokens."""
    tokens_per_chunk: float
    without_usage: int
    """Answers whose tokens the server did not count."""


def meets(record: Record, objectives: Mapping[str, float]) -> bool:
    """Whether a request succeeded within all objectives (milliseconds of ttft, tpot, e2e). One token has TPOT 0."""
    times = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2e": record.latency}
    return not record.error and all(times[name] * 1e3 <= limit for name, limit in objectives.items())


def summarize(records: Sequence[Record], objectives: Mapping[str, float]) -> Metrics:
    """The figures of at least one finished request."""
    assert records, "a level without requests has no figures"
    good = [record for record in records if not record.error]
    seconds = max(max(record.end, record.start) for record in records) - min(record.start for record in records)
    # One request that failed at once took no time at all.
    per_second = 1 / seconds if seconds > 0 else 0.0
    input_tokens = sum(record.input_tokens for record in good)
    output_tokens = sum(record.num_output_tokens for record in good)
    num_good = sum(meets(record, objectives) for record in records)
    examples = {record.error: record.detail for record in reversed(records) if record.error}
    tpots = [record.tpot for record in good]
    return Metrics(
        requests=len(records),
        succeeded=len(good),
        errors=dict(Counter(record.error for record in records if record.error).most_common()),
        error_examples=examples,
        seconds=seconds,
        requests_per_second=len(good) * per_second,
        output_tokens_per_second=output_tokens * per_second,
        total_tokens_per_second=(input_tokens + output_tokens) * per_second,
        ttft_ms=Spread.of([record.ttft for record in good]),
        tpot_ms=Spread.of([tpot for tpot in tpots if tpot is not None]),
        itl_ms=Spread.of([gap for record in good for gap in record.gaps]),
        e2e_ms=Spread.of([record.latency for record in good]),
        goodput=num_good * per_second if objectives else None,
        good_share=num_good / len(records) if objectives else None,
        mean_input_tokens=input_tokens / max(1, len(good)),
        mean_output_tokens=output_tokens / max(1, len(good)),
        wanted_output_tokens=sum(record.wanted_output_tokens for record in good) / max(1, len(good)),
        cached_share=sum(record.cached_tokens for record in good) / max(1, input_tokens),
        tokens_per_chunk=output_tokens / max(1, sum(len(record.content_times) for record in good)),
        without_usage=sum(not record.has_usage for record in good),
    )
