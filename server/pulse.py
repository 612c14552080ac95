"""The engine's pulse: a pipe to the supervisor, on which a thread of the engine says that its loop goes on, or that it
is stuck.

A thread, since a step may take long without being stuck. It falls silent when the process is stopped, or gets no time
on a machine that has too much to do. Neither end goes by the clock: a pause of the whole container counts for nothing.
"""

import contextlib
import os
import threading
import time

BEAT_SECONDS = 0.25
ALIVE, STUCK = b".", b"!"
READ_BYTES = 4096
IMPORT_SECONDS = 60.0
"""More that an engine gets before its first beat: it imports torch."""
LONGEST_LOOK = 1.0
"""Of the time between two looks at the pipe, what counts as silence: whoever looks later was itself kept from it."""


class Pulse:
    """Engine process. It beats from the start on; once `loop` was called, the loop must come round within
    `step_timeout`."""

    def __init__(self, pipe: int, step_timeout: float) -> None:
        self._pipe, self._beats_of_step = pipe, step_timeout / BEAT_SECONDS
        self._beats: int | None = None
        """Since the loop came round; None before it first did."""
        threading.Thread(target=self._run, daemon=True, name="pulse").start()

    def loop(self) -> None:
        """The loop comes round."""
        self._beats = 0

    def _run(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone: `child.py` ends the process
            while True:
                os.write(self._pipe, self._beat())
                time.sleep(BEAT_SECONDS)

    def _beat(self) -> bytes:
        if self._beats is None:
            return ALIVE
        self._beats += 1
        return ALIVE if self._beats <= self._beats_of_step else STUCK


class PulseWatch:
    """Supervisor process: the other end. `pipe` is for the engine."""

    def __init__(self) -> None:
        self._reading, self.pipe = os.pipe()
        os.set_blocking(self._reading, False)
        self.silence = -IMPORT_SECONDS
        """Seconds without a beat; negative before the first is due."""
        self.stuck = False
        """The loop has not come round within the time of a step."""
        self._looked_at = time.monotonic()

    def look(self) -> None:
        """Read what has come; to be called several times a second."""
        now = time.monotonic()
        self.silence += min(now - self._looked_at, LONGEST_LOOK)
        self._looked_at = now
        with contextlib.suppress(BlockingIOError):
            if beats := os.read(self._reading, READ_BYTES):
                self.silence, self.stuck = 0.0, beats.endswith(STUCK)

    def close(self) -> None:
        """Both ends."""
        os.close(self._reading)
        os.close(self.pipe)
