"""What the engines tell of themselves, in /metrics, and what became of those that were lost. API process; registered by
`server/metrics.py`.

As vLLM's, the series of an engine have the label `engine`: the number of its replica.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from server.generation import Engine
from server.total_stats import sums
from server.wire import Stats

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


@dataclass(slots=True)
class _Counted:
    """The counters of a replica. They never fall: those of a restarted engine begin at 0 again, and are added to what
    its predecessors were last seen with."""

    last: Stats | None = None
    base: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ENGINE_COUNTERS, 0))
    base_per_position: tuple[int, ...] = ()

    def observe(self, stats: Stats | None) -> None:
        """The newest statistics."""
        if stats is None:
            return
        if self.last is not None and stats.generation != self.last.generation:
            for name in self.base:
                self.base[name] += getattr(self.last, name)
            self.base_per_position = sums(self.base_per_position, self.last.accepted_per_position)
        self.last = stats

    def value(self, name: str) -> int:
        """Of all engines so far."""
        return self.base[name] + (getattr(self.last, name) if self.last else 0)

    @property
    def per_position(self) -> tuple[int, ...]:
        """Accepted drafts of all engines so far."""
        return sums(self.base_per_position, self.last.accepted_per_position if self.last else ())


class EngineCollector:
    """Exports the newest statistics of each engine."""

    def __init__(self, engine: Engine, prefix: str, model_name: str) -> None:
        self._engine, self._prefix, self._model_name = engine, prefix, model_name
        self._counted: list[_Counted] = []

    def observe(self) -> None:
        """Take note of the engines' counters, so that a restart loses none that were seen."""
        replicas = self._engine.replicas
        self._counted += [_Counted() for _ in range(len(replicas) - len(self._counted))]
        for counted, stats in zip(self._counted, replicas, strict=True):
            counted.observe(stats)

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        self.observe()
        yield from self._gauges(self._engine.replicas)
        for field_name, (name, text) in _ENGINE_COUNTERS.items():
            counter = self._counter(name, text, "engine")
            for replica, counted in enumerate(self._counted):
                counter.add_metric([self._model_name, str(replica)], counted.value(field_name))
            yield counter
        for field_name, (name, text) in _RECOVERY_COUNTERS.items():
            counter = self._counter(name, text)
            counter.add_metric([self._model_name], getattr(self._engine.recovery, field_name))
            yield counter
        yield self._accepted_per_position()

    def _gauges(self, replicas: tuple[Stats | None, ...]) -> Iterator[Metric]:
        running = [float(stats.running) if stats else 0.0 for stats in replicas]
        yield self._gauge("num_requests_running", "sequences that are running", running)
        waiting = [float(stats.waiting) if stats else 0.0 for stats in replicas]
        yield self._gauge("num_requests_waiting", "sequences that wait for their turn", waiting)
        text = "share of the KV blocks that running sequences hold, 0 to 1"
        yield self._gauge("kv_cache_usage_perc", text, [_kv_usage(stats) for stats in replicas])
        text = "share of the encoder cache's memory that is filled, 0 to 1"
        yield self._gauge("encoder_cache_usage_perc", text, [self._encoder_usage(stats) for stats in replicas])

    def _accepted_per_position(self) -> Metric:
        """A series for each place behind the newest token at which a draft was ever accepted."""
        text = "drafts that became output, by their place behind the newest token"
        counter = self._counter("spec_decode_num_accepted_tokens_per_pos", text, "engine", "position")
        for replica, counted in enumerate(self._counted):
            for position, count in enumerate(counted.per_position):
                counter.add_metric([self._model_name, str(replica), str(position)], count)
        return counter

    def _encoder_usage(self, stats: Stats | None) -> float:
        """0 for a model without images."""
        size = self._engine.info.encoder_cache_bytes if stats else 0
        return stats.encoder_bytes / size if stats and size else 0.0

    def _counter(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(self._prefix + name, text, labels=["model_name", *labels])

    def _gauge(self, name: str, text: str, values: list[float]) -> Metric:
        gauge = GaugeMetricFamily(self._prefix + name, text, labels=["model_name", "engine"])
        for replica, value in enumerate(values):
            gauge.add_metric([self._model_name, str(replica)], value)
        return gauge


def _kv_usage(stats: Stats | None) -> float:
    return (stats.total_blocks - stats.free_blocks) / stats.total_blocks if stats and stats.total_blocks else 0.0
