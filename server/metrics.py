"""The Prometheus metrics of the gateway, under the names of vLLM's family with the prefix `firstlight:`.

One `Metrics` with its own registry for each app; made by `server/app.py`, fed by `server/stream.py`, read by
`server/api/health.py`. API process. Gauges and engine counters come from the engine's statistics; the rest is measured
here, at the gateway, where a client would measure it. Histograms count choices, not requests.
"""

import time
from collections.abc import Iterator
from itertools import zip_longest

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from server.generation import Engine
from server.rank_metrics import RankCollector
from server.wire import Stats

PREFIX = "firstlight:"
FINISHED_REASONS = ("stop", "length", "abort", "timeout", "error")
_ENGINE_COUNTERS = {
    "preemptions": ("num_preemptions", "sequences that lost their KV blocks and were computed again"),
    "prefix_queries": ("prefix_cache_queries", "prompt tokens looked up in the prefix cache"),
    "prefix_hits": ("prefix_cache_hits", "prompt tokens found in the prefix cache"),
    "prompt_tokens": ("prompt_tokens", "prompt tokens processed"),
    "generation_tokens": ("generation_tokens", "tokens generated"),
    "drafts": ("spec_decode_num_drafts", "times that a sequence had drafts in a step"),
    "draft_tokens": ("spec_decode_num_draft_tokens", "drafts that were computed"),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "drafts that became output"),
    "images_encoded": ("images_encoded", "images that the vision tower encoded"),
    "encoder_hits": ("encoder_cache_hits", "images that a sequence needed and found encoded"),
}
_RECOVERY_COUNTERS = {
    "engines_lost": ("engine_restarts", "engines that crashed, were killed or were stuck"),
    "sequences_replayed": ("recovery_replays", "sequences that a new engine went on with"),
    "sequences_resumed": ("recovery_resumptions", "those of them that had a token since"),
    "pause_seconds": ("recovery_pause_seconds", "how long they were without one because of it, all together"),
    "sequences_quarantined": ("recovery_quarantines", "sequences ended because they made engines crash"),
}
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_LONG_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


def _sums(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Entry by entry; what is missing at an end is 0."""
    return tuple(left + right for left, right in zip_longest(first, second, fillvalue=0))


class EngineCollector:
    """Exports the engine's newest statistics. Its counters never fall: those of a restarted engine begin at 0 again,
    and are added to what its predecessors were last seen with."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name
        self._last: Stats | None = None
        self._base = dict.fromkeys(_ENGINE_COUNTERS, 0)
        self._base_per_position: tuple[int, ...] = ()

    def observe(self) -> None:
        """Take note of the engine's counters, so that a restart loses none that were seen."""
        stats = self._engine.stats
        if stats is None:
            return
        if self._last is not None and stats.generation != self._last.generation:
            for name in self._base:
                self._base[name] += getattr(self._last, name)
            self._base_per_position = _sums(self._base_per_position, self._last.accepted_per_position)
        self._last = stats

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        self.observe()
        stats = self._engine.stats
        yield self._gauge("num_requests_running", "sequences that are running", stats.running if stats else 0)
        yield self._gauge("num_requests_waiting", "sequences that wait for their turn", stats.waiting if stats else 0)
        used = stats.total_blocks - stats.free_blocks if stats else 0
        share = used / stats.total_blocks if stats and stats.total_blocks else 0.0
        yield self._gauge("kv_cache_usage_perc", "share of the KV blocks that running sequences hold, 0 to 1", share)
        share = self._encoder_usage(stats)
        yield self._gauge(
            "encoder_cache_usage_perc", "share of the encoder cache's memory that is filled, 0 to 1", share
        )
        for field, (name, text) in _ENGINE_COUNTERS.items():
            seen = getattr(self._last, field) if self._last else 0
            yield self._counter(name, text, self._base[field] + seen)
        for field, (name, text) in _RECOVERY_COUNTERS.items():
            yield self._counter(name, text, getattr(self._engine.recovery, field))
        yield self._accepted_per_position()

    def _accepted_per_position(self) -> Metric:
        """A series for each place behind the newest token at which a draft was ever accepted."""
        counter = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "drafts that became output, by their place behind the newest token",
            labels=["model_name", "position"],
        )
        seen = self._last.accepted_per_position if self._last else ()
        for position, count in enumerate(_sums(self._base_per_position, seen)):
            counter.add_metric([self._model_name, str(position)], count)
        return counter

    def _encoder_usage(self, stats: Stats | None) -> float:
        """0 for a model without images."""
        size = self._engine.info.encoder_cache_bytes if stats else 0
        return stats.encoder_bytes / size if stats and size else 0.0

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        counter.add_metric([self._model_name], value)
        return counter

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge


class Metrics:
    """All metrics of one app."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._model_name = model_name
        self.registry = CollectorRegistry()
        self.engine = EngineCollector(engine, model_name)
        self.registry.register(self.engine)
        self.registry.register(RankCollector(lambda: engine.stats, PREFIX, model_name))
        self._success = Counter(
            PREFIX + "request_success", "choices that ended", ["model_name", "finished_reason"], registry=self.registry
        )
        for reason in FINISHED_REASONS:
            self._success.labels(model_name, reason)
        images = Counter(PREFIX + "images_received", "images of requests", ["model_name"], registry=self.registry)
        self._images = images.labels(model_name)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "from the request's arrival to its first token", _SHORT_SECONDS
        )
        self.gap = self._histogram("inter_token_latency_seconds", "from one token to the next", _SHORT_SECONDS)
        self.latency = self._histogram("e2e_request_latency_seconds", "from arrival to the end", _LONG_SECONDS)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "prompt tokens of a choice", _TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "tokens of a choice", _TOKENS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._model_name)

    def count_end(self, reason: str) -> None:
        """A choice ended; `reason` is one of FINISHED_REASONS."""
        self._success.labels(self._model_name, reason).inc()

    def count_images(self, count: int) -> None:
        """A request brought images that can be used."""
        self._images.inc(count)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class RequestMeter:
    """Measures the choices of one request."""

    def __init__(self, metrics: Metrics, started: float) -> None:
        self._metrics, self._started = metrics, started
        self._last_token: dict[int, float] = {}

    def tokens(self, index: int, count: int) -> None:
        """A choice got `count` tokens in one step; they share the time since the last ones."""
        now = time.monotonic()
        last = self._last_token.get(index)
        self._last_token[index] = now
        if last is None:
            self._metrics.first_token.observe(now - self._started)
            return
        for _ in range(count):
            self._metrics.gap.observe((now - last) / count)

    def ended(self, reason: str, prompt_tokens: int, generation_tokens: int) -> None:
        """A choice ended, for one of FINISHED_REASONS."""
        self._metrics.count_end(reason)
        self._metrics.latency.observe(time.monotonic() - self._started)
        self._metrics.prompt_tokens.observe(prompt_tokens)
        self._metrics.generation_tokens.observe(generation_tokens)
        self._metrics.engine.observe()
