"""What the ranks of an engine cost each other, in /metrics. API process; registered by `server/metrics.py`.

Counters begin at 0 with each engine: what is of interest is how they grow, and Prometheus knows of such resets.
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from server.wire import Stats

_COUNTERS = {
    "steps": ("rank_steps", "steps that the rank computed"),
    "step_seconds": ("rank_step_seconds", "how long they took"),
    "collectives": ("rank_collectives", "sums and exchanges with the other ranks"),
    "sent_bytes": ("rank_collective_bytes", "what the rank gave to them"),
    "collective_seconds": ("rank_collective_seconds", "how long they took"),
    "waiting_seconds": ("rank_waiting_seconds", "how long of it the rank waited for a later one"),
}


class RankCollector:
    """A series for each rank; none for an engine of one."""

    def __init__(self, stats: Callable[[], Stats | None], prefix: str, model_name: str) -> None:
        self._stats, self._prefix, self._model_name = stats, prefix, model_name

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        stats = self._stats()
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(self._prefix + name, text, labels=["model_name", "rank"])
            for rank in stats.ranks if stats else ():
                counter.add_metric([self._model_name, str(rank.rank)], getattr(rank, field))
            yield counter
