"""When a replica gets its next engine, and when that is hopeless."""

from dataclasses import dataclass, field

import pytest

from server import replica
from server.child import EXIT_BAD_CONFIGURATION
from server.config import ProcessConfig, ServeConfig
from server.replica import BACKOFF_SECONDS, EXIT_NO_ENGINE, MAX_FAILED_RESTARTS, MAX_FAILED_STARTS, Replica

TWO = ServeConfig(process=ProcessConfig(data_parallel_size=2))


@dataclass
class FakeEngine:
    generation: int
    exit_code: int | None = None
    how_it_ended: str = "ended (exit code 1)"
    replica: int | None = None
    looks: int = 0
    told: list[ServeConfig] = field(default_factory=list)

    def configure(self, config: ServeConfig, replica: int) -> None:
        self.told.append(config)
        self.replica = replica

    def kill_if_stalled(self, limits: ProcessConfig) -> None:
        self.looks += 1


@dataclass
class Clock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(replica, "time", clock)
    return clock


def make(config: ServeConfig = TWO) -> tuple[Replica, FakeEngine]:
    engine = FakeEngine(generation=4)
    return Replica(1, engine, config), engine  # type: ignore[arg-type]


def fail(one: Replica, clock: Clock) -> float:
    """The engine ends with 1; seconds until the next one, which starts."""
    one.engine.exit_code = 1  # type: ignore[misc]
    assert one.watch() == 1
    one.plan_restart()
    assert one.watch() is None
    began = clock.now
    while not one.needs_engine:
        clock.now += 0.1
    one.start(FakeEngine(generation=one.engine.generation + 3))  # type: ignore[arg-type]
    assert not one.needs_engine
    return clock.now - began


def test_an_engine_is_told_whose_it_is_and_watched(clock: Clock) -> None:
    one, engine = make()
    assert (engine.told, engine.replica) == ([TWO], 1)
    assert one.watch() is None
    assert engine.looks == 1
    assert not one.is_ready
    one.hear_ready(4)
    assert one.is_ready


def test_starts_that_fail_wait_longer_and_longer(clock: Clock) -> None:
    one, _ = make()
    one.hear_ready(4)
    waits = [fail(one, clock) for _ in range(7)]
    assert waits == pytest.approx([*BACKOFF_SECONDS, BACKOFF_SECONDS[-1]], abs=0.11)
    one.hear_ready(one.engine.generation)
    assert fail(one, clock) == 0.0


def test_when_it_is_hopeless(clock: Clock) -> None:
    one, _ = make()
    assert one.why_hopeless(EXIT_BAD_CONFIGURATION) == (EXIT_BAD_CONFIGURATION, "")
    for _ in range(MAX_FAILED_STARTS):
        assert one.why_hopeless(1) is None
        fail(one, clock)
    assert one.why_hopeless(1) == (EXIT_BAD_CONFIGURATION, "engine 1 ended (exit code 1) and was never ready")
    one.hear_ready(one.engine.generation)
    for _ in range(MAX_FAILED_RESTARTS + 1):
        assert one.why_hopeless(1) is None
        fail(one, clock)
    reason = f"engine 1 ended (exit code 1) before it was ready, {MAX_FAILED_RESTARTS + 1} times"
    assert one.why_hopeless(1) == (EXIT_NO_ENGINE, reason)


def test_names(clock: Clock) -> None:
    """Of what people read."""
    assert [make(config)[0].plan_restart() for config in (TWO, ServeConfig())] == [
        "engine 1 ended (exit code 1) and is being restarted",
        "the engine ended (exit code 1) and is being restarted",
    ]
