"""Commands that started a server do not leave it behind when they are told to go. Used by `chat` and `validate`."""

import signal
import sys
from types import FrameType


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def leave_by_exception() -> None:
    """From here on SIGTERM, and SIGHUP of a closed terminal, end this process as an error does: what it opened is
    closed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
