"""Faults that tests ask for: what a cache salt says, and what happens to the process."""

import signal

import pytest

from server import faults
from server.faults import CRASH_EXIT_CODE, DELAY_SECONDS, HANG_SECONDS, Fault, fault_of


def test_what_a_salt_asks_for() -> None:
    assert fault_of(b"fault:kill@commit") == Fault(action="kill", point="commit")
    assert fault_of(b"fault:stop") == Fault(action="stop", point="take")
    assert fault_of(b"") is fault_of(b"somebody's own") is None
    with pytest.raises(AssertionError, match="explode is no fault"):
        fault_of(b"fault:explode@plan")


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("crash", [CRASH_EXIT_CODE, 0.0]),
        ("kill", [signal.SIGKILL, 0.0]),
        ("stop", [signal.SIGSTOP, 0.0]),
        ("hang", [HANG_SECONDS]),
        ("delay", [DELAY_SECONDS]),
        ("corrupt", [0.0]),
    ],
)
def test_what_happens(monkeypatch: pytest.MonkeyPatch, action: str, expected: list[float]) -> None:
    happened: list[float] = []
    monkeypatch.setattr(faults.os, "_exit", happened.append)
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: happened.append(number))
    monkeypatch.setattr(faults.time, "sleep", happened.append)
    fault = fault_of(f"fault:{action}@plan".encode())
    assert fault is not None
    fault.happen()
    assert happened == expected
