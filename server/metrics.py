"""The Prometheus metrics of the gateway, under the names of vLLM's family with the prefix `firstlight:`.

One `Metrics` with its own registry for each app; made by `server/app.py`, fed by `server/stream.py`, read by
`server/api/health.py`. API process. Gauges and engine counters come from the engines' statistics (`engine_metrics.py`,
`rank_metrics.py`); the rest is measured here, at the gateway, where a client would measure it. Histograms count
choices, not requests.
"""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from server.engine_metrics import EngineCollector
from server.generation import Engine
from server.rank_metrics import RankCollector

PREFIX = "firstlight:"
FINISHED_REASONS = ("stop", "length", "abort", "timeout", "error")
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_LONG_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """All metrics of one app."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._model_name = model_name
        self.registry = CollectorRegistry()
        self.engine = EngineCollector(engine, PREFIX, model_name)
        self.registry.register(self.engine)
        self.registry.register(RankCollector(engine, PREFIX, model_name))
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
