"""Runs the levels of a load test against each server in turn. Used by `loadtest/command.py`."""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import uvloop

from loadtest.arrivals import offsets
from loadtest.checks import ClientCost, warnings_of
from loadtest.http_client import StreamingClient, Target
from loadtest.load import OnRecord, Sender, closed_loop, open_loop
from loadtest.metrics import Metrics, Spread, summarize
from loadtest.probe import Probe
from loadtest.record import Record
from loadtest.resources import CpuMeter, LagMonitor, find_server
from loadtest.settings import Level, LoadTestError, Server, Settings
from loadtest.trace import read_trace
from loadtest.words import Calibration
from loadtest.workload import Session, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """One level on one server."""

    server: str
    level: Level
    metrics: Metrics
    client: ClientCost
    server_cores: float | None
    warnings: tuple[str, ...]
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A server that was looked at and can be loaded."""

    server: Server
    target: Target
    model: str
    calibration: Calibration
    pid: int | None


class Runner:
    """The whole run. `prepare` first; then `level` for each level and subject. Raises LoadTestError for a bad trace."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._trace = read_trace(settings.shape.trace) if settings.shape.trace is not None else []
        if settings.api == "completions" and any(line.messages for line in self._trace):
            raise LoadTestError("the trace has messages: they need --api chat")

    def prepare(self, server: Server) -> Subject:
        """Ask a server what must be known. Raises LoadTestError."""
        with Probe(server, self._headers, self._settings.api) as probe:
            model = self._settings.model or probe.model()
            calibration = probe.calibrate(model)
        target = Target.parse(server.url)
        pid = server.pid or find_server(target)
        return Subject(server=server, target=target, model=model, calibration=calibration, pid=pid)

    def warm_up(self, subject: Subject) -> None:
        """Requests that do not count, all at once. What makes them fail shows again in what follows."""
        if not (count := self._settings.warmup):
            return
        workload = Workload(self._settings.shape, subject.calibration)
        sessions = [workload.session("warm-up", index) for index in range(count)]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._measure(subject, Level(concurrency=count), sessions, [], lambda record: None))

    def level(self, subject: Subject, level: Level, on_record: OnRecord) -> LevelResult:
        """Load a server and measure it."""
        sessions, times = self._sessions(subject, level)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._measure(subject, level, sessions, times, on_record))

    def num_requests(self, level: Level) -> int:
        """For a progress bar; sessions that fail take fewer."""
        turns = self._settings.shape.turns if self._settings.shape.workload == "chat" else 1
        return len(self._trace) or turns * self._settings.num_requests(level)

    def _sessions(self, subject: Subject, level: Level) -> tuple[list[Session], list[float]]:
        """What to send and, in an open loop, when; a closed loop has no times."""
        settings = self._settings
        workload = Workload(settings.shape, subject.calibration)
        if self._trace:
            times = [line.offset - self._trace[0].offset for line in self._trace]
            return [workload.traced(line, index) for index, line in enumerate(self._trace)], times
        count = settings.num_requests(level)
        sessions = [workload.session(level.label, index) for index in range(count)]
        if level.rate is None:
            return sessions, []
        rng = random.Random(f"{settings.shape.seed}/arrivals/{level.label}")
        return sessions, offsets(settings.arrival, level.rate, count, settings.burst_size, rng)

    async def _measure(
        self, subject: Subject, level: Level, sessions: list[Session], times: list[float], on_record: OnRecord
    ) -> LevelResult:
        meter, lags = CpuMeter(subject.pid), LagMonitor()
        watch = asyncio.create_task(lags.watch())
        meter.start()
        try:
            with self._sender(subject, on_record) as sender:
                if level.concurrency is None:
                    records = await open_loop(sender, sessions, times)
                else:
                    records = await closed_loop(sender, sessions, level.concurrency, level.ramp)
        finally:
            watch.cancel()
        cores, server_cores = meter.cores()
        metrics = summarize(records, self._settings.goodput)
        lateness = Spread.of([record.lateness for record in records])
        assert lateness is not None, "a level has requests"
        client = ClientCost(
            cores=cores,
            lag_p50_ms=lags.percentile_ms(50),
            lag_p99_ms=lags.percentile_ms(99),
            lateness_p99_ms=lateness.p99,
        )
        return LevelResult(
            server=subject.server.name,
            level=level,
            metrics=metrics,
            client=client,
            server_cores=server_cores,
            warnings=warnings_of(metrics, client, self._settings, subject.calibration),
            records=tuple(records),
        )

    @contextlib.contextmanager
    def _sender(self, subject: Subject, on_record: OnRecord) -> Iterator[Sender]:
        client = StreamingClient(subject.target, self._headers, self._settings.timeout_seconds)
        try:
            yield Sender(client=client, settings=self._settings, model=subject.model, on_record=on_record)
        finally:
            client.close()
