"""What the supervisor hears of an engine, and what it concludes."""

import os

import pytest

from server import pulse
from server.pulse import ALIVE, IMPORT_SECONDS, LONGEST_LOOK, STUCK, Pulse, PulseWatch


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(pulse.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def looks(watch: PulseWatch, clock: Clock, count: int, apart: float) -> float:
    for _ in range(count):
        clock.now += apart
        watch.look()
    return watch.silence


def test_silence_is_what_was_looked_at(clock: Clock) -> None:
    """A supervisor that was itself stopped for an hour has not heard an hour of silence."""
    watch = PulseWatch()
    assert looks(watch, clock, 4, 0.5) == 2.0 - IMPORT_SECONDS
    os.write(watch.pipe, ALIVE * 3)
    assert looks(watch, clock, 1, 0.5) == 0.0
    assert looks(watch, clock, 3, 0.5) == 1.5
    assert looks(watch, clock, 1, 3600.0) == 1.5 + LONGEST_LOOK
    assert not watch.stuck
    watch.close()


def test_a_step_without_end_is_told(clock: Clock) -> None:
    watch = PulseWatch()
    os.write(watch.pipe, ALIVE + STUCK)
    looks(watch, clock, 1, 0.1)
    assert (watch.stuck, watch.silence) == (True, 0.0)
    os.write(watch.pipe, ALIVE)
    looks(watch, clock, 1, 0.1)
    assert not watch.stuck
    watch.close()


def test_a_step_is_measured_in_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the clock: an engine that was stopped for an hour in a step has not computed for an hour."""
    said: list[bytes] = []
    beats = 0

    def sleep(seconds: float) -> None:
        nonlocal beats
        assert seconds == 0.25
        beats += 1
        if beats in (4, 10):
            heart.loop()
        if beats == 16:
            raise BrokenPipeError

    monkeypatch.setattr(pulse.threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(pulse.time, "sleep", sleep)
    monkeypatch.setattr(pulse.os, "write", lambda pipe, beat: said.append(beat))
    heart = Pulse(7, step_timeout=1.0)
    heart._run()
    assert b"".join(said) == ALIVE * 4 + (ALIVE * 4 + STUCK * 2) * 2
