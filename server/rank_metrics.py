"""What the ranks of the engines cost each other, in /metrics. API process; registered by `server/metrics.py`."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric

from server.generation import Engine
from server.wire import Stats

_COUNTERS = {
    "steps": ("rank_steps", "steps that the rank computed"),
    "step_seconds": ("rank_step_seconds", "how long they took"),
    "collectives": ("rank_collectives", "sums and exchanges with the other ranks"),
    "sent_bytes": ("rank_collective_bytes", "what the rank gave to them"),
    "collective_seconds": ("rank_collective_seconds", "how long they took"),
    "waiting_seconds": ("rank_waiting_seconds", "how long of it the rank waited for a later one"),
    "expert_tokens": ("rank_expert_tokens", "tokens that the rank's experts computed, once for each expert"),
}


class RankCollector:
    """A series for each rank of each engine; none for an engine of one. As those of engines, its counters never fall:
    what a restarted engine's ranks count from 0 is added to what their predecessors were last seen with."""

    def __init__(self, engine: Engine, prefix: str, model_name: str) -> None:
        self._engine, self._prefix, self._model_name = engine, prefix, model_name
        self._counted: list[_Counted] = []

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        replicas = self._engine.replicas
        self._counted += [_Counted() for _ in range(len(replicas) - len(self._counted))]
        for counted, stats in zip(self._counted, replicas, strict=True):
            counted.observe(stats)
        sums = [counted.sums() for counted in self._counted]
        for field_name, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(self._prefix + name, text, labels=["model_name", "engine", "rank"])
            for replica, ranks in enumerate(sums):
                for rank, counts in sorted(ranks.items()):
                    counter.add_metric([self._model_name, str(replica), str(rank)], counts[field_name])
            yield counter


@dataclass(slots=True)
class _Counted:
    """The ranks of a replica."""

    last: Stats | None = None
    base: dict[int, dict[str, float]] = field(default_factory=dict)
    """Of lost engines, by rank and field."""

    def observe(self, stats: Stats | None) -> None:
        """The newest statistics."""
        if stats is not None:
            if self.last is not None and stats.generation != self.last.generation:
                self.base = self.sums()
            self.last = stats

    def sums(self) -> dict[int, dict[str, float]]:
        """Of lost engines and the last one."""
        sums = dict(self.base)
        for rank in self.last.ranks if self.last else ():
            before = sums.get(rank.rank, dict.fromkeys(_COUNTERS, 0))
            sums[rank.rank] = {name: before[name] + getattr(rank, name) for name in _COUNTERS}
        return sums
