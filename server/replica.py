"""A replica: one engine after the other, each watched, and the next one started in time.

Used by `server/supervisor.py`; supervisor process.
"""

import logging
import time

from server.child import EXIT_BAD_CONFIGURATION
from server.children import EngineProcess, describe
from server.config import ServeConfig

logger = logging.getLogger(__name__)

BACKOFF_SECONDS = (0.0, 0.2, 1.0, 2.0, 5.0, 10.0)
"""Before a start, by the number of starts that failed since one succeeded."""
MAX_FAILED_STARTS = 2
"""Starts that may fail before the first success; one more is hopeless."""
MAX_FAILED_RESTARTS = 5
"""Starts in a row that may fail later; one more is hopeless. Crashes of an engine that was ready are not counted:
requests that cause them are found out (`replay.py`)."""
EXIT_NO_ENGINE = 1


class Replica:
    """One engine at a time, of which the first starts with it."""

    def __init__(self, number: int, engine: EngineProcess, config: ServeConfig) -> None:
        self.number, self._config = number, config
        self.engine = engine
        engine.configure(config, number)
        self._failures = 0
        self._restart_at: float | None = None
        self._ready_generation: int | None = None
        """Of the newest engine that was ready."""
        self.ready_at = 0.0
        self._lost_at: float | None = None
        """When the newest engine that was ready ended; None while there is one."""

    @property
    def name(self) -> str:
        """For people."""
        return "the engine" if self._config.process.data_parallel_size == 1 else f"engine {self.number}"

    @property
    def is_ready(self) -> bool:
        """Its engine is, as far as is known."""
        return self._ready_generation == self.engine.generation and self._restart_at is None

    @property
    def needs_engine(self) -> bool:
        """It is time for the next one."""
        return self._restart_at is not None and time.monotonic() >= self._restart_at

    def start(self, engine: EngineProcess) -> None:
        """With the next engine."""
        self._restart_at = None
        self.engine = engine
        engine.configure(self._config, self.number)

    def hear_ready(self, generation: int) -> None:
        """An engine of its said so."""
        is_first = self._ready_generation is None
        self._ready_generation, self.ready_at, self._failures = generation, time.monotonic(), 0
        if self._lost_at is not None:
            logger.info("%s is back after %.1f s", self.name, self.ready_at - self._lost_at)
        elif is_first and self._config.process.data_parallel_size > 1:
            logger.info("%s is ready", self.name)
        self._lost_at = None

    def watch(self) -> int | None:
        """Kill the engine if it is stuck; the exit code of one that has ended and whose successor is not planned."""
        if self._restart_at is not None:
            return None
        if (code := self.engine.exit_code) is None:
            self.engine.kill_if_stalled(self._config.process)
        return code

    def why_hopeless(self, code: int) -> tuple[int, str] | None:
        """Where a new engine would fare no better: (exit code for the server, reason; none where the engine has said
        it)."""
        if code == EXIT_BAD_CONFIGURATION:
            return code, ""
        how = f"{self.name} ended ({describe(code)})"
        if self._ready_generation is None and self._failures >= MAX_FAILED_STARTS:
            return EXIT_BAD_CONFIGURATION, f"{how} and was never ready"
        if self._failures >= MAX_FAILED_RESTARTS:
            return EXIT_NO_ENGINE, f"{how} before it was ready, {self._failures + 1} times"
        return None

    def plan_restart(self) -> str:
        """The engine has ended, and the caller cleans up behind it; why, for people."""
        now = time.monotonic()
        self._failures += self._ready_generation != self.engine.generation
        delay = BACKOFF_SECONDS[min(self._failures, len(BACKOFF_SECONDS) - 1)]
        self._restart_at = now + delay
        if self._ready_generation is not None and self._lost_at is None:
            self._lost_at = now
        reason = f"{self.name} {self.engine.how_it_ended} and is being restarted"
        logger.error("%s in %.1f s", reason, delay)
        return reason
