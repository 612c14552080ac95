"""What the ranks of an engine cost each other, in /metrics. API process; registered by `server/metrics.py`."""

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
    """A series for each rank; none for an engine of one. As those of the engine, its counters never fall: what a
    restarted engine's ranks count from 0 is added to what their predecessors were last seen with."""

    def __init__(self, stats: Callable[[], Stats | None], prefix: str, model_name: str) -> None:
        self._stats, self._prefix, self._model_name = stats, prefix, model_name
        self._last: Stats | None = None
        self._base: dict[int, dict[str, float]] = {}
        """Of lost engines, by rank and field."""

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        stats = self._stats()
        if stats is not None:
            if self._last is not None and stats.generation != self._last.generation:
                self._base = self._sums()
            self._last = stats
        sums = self._sums()
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(self._prefix + name, text, labels=["model_name", "rank"])
            for rank, counts in sorted(sums.items()):
                counter.add_metric([self._model_name, str(rank)], counts[field])
            yield counter

    def _sums(self) -> dict[int, dict[str, float]]:
        """Of lost engines and the last one."""
        sums = dict(self._base)
        for rank in self._last.ranks if self._last else ():
            before = sums.get(rank.rank, dict.fromkeys(_COUNTERS, 0))
            sums[rank.rank] = {field: before[field] + getattr(rank, field) for field in _COUNTERS}
        return sums
