"""The engine's pulse: a pipe to the supervisor, on which a thread of the engine says that its loop goes on.

A thread, since a step may take long without being stuck; it falls silent when the process is stopped, when the
interpreter is, or when the loop has not come round for longer than a step may take.
"""

import contextlib
import os
import threading
import time

BEAT_SECONDS = 0.25
READ_BYTES = 4096
IMPORT_SECONDS = 60.0
"""More that an engine gets before its first beat: it imports torch."""


class Pulse:
    """Engine process. It beats while the model is loaded and from then on as long as `loop` is called."""

    def __init__(self, pipe: int, step_timeout: float) -> None:
        self._pipe, self._step_timeout = pipe, step_timeout
        self._last_loop: float | None = None
        threading.Thread(target=self._run, daemon=True, name="pulse").start()

    def loop(self) -> None:
        """The loop comes round."""
        self._last_loop = time.monotonic()

    def _run(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone: `child.py` ends the process
            while True:
                last = self._last_loop
                if last is None or time.monotonic() - last < self._step_timeout:
                    os.write(self._pipe, b".")
                time.sleep(BEAT_SECONDS)


class PulseWatch:
    """Supervisor process: the other end. `pipe` is for the engine."""

    def __init__(self) -> None:
        self._reading, self.pipe = os.pipe()
        os.set_blocking(self._reading, False)
        self._heard = time.monotonic() + IMPORT_SECONDS

    def silence(self) -> float:
        """Seconds since the last beat; negative before the first is due."""
        with contextlib.suppress(BlockingIOError):
            if os.read(self._reading, READ_BYTES):
                self._heard = time.monotonic()
        return time.monotonic() - self._heard

    def close(self) -> None:
        """Both ends."""
        os.close(self._reading)
        os.close(self.pipe)
