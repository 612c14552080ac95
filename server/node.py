"""`firstlight serve` on another machine than the first: its ranks, started again whenever one ends.

The process that `serve` is there; the first machine has the gateway and the engine. Ranks end when the engine does, and
wait for the next one.
"""

import logging
import signal
import time
from pathlib import Path
from types import FrameType

from server.child import EXIT_BAD_CONFIGURATION
from server.children import EngineProcess
from server.config import ServeConfig
from server.run_dir import RunDir

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
BACKOFF_SECONDS = (0.5, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Before the next start, by the number of starts in a row that ended early."""
EARLY_SECONDS = 30.0


class Node:
    """The ranks of this machine."""

    def __init__(self, config: ServeConfig) -> None:
        self._config, self._stopping = config, False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def run(self) -> int:
        """Until told to stop, or a rank finds the configuration at fault, or is refused for it by machine 0.
        Raises OptionError."""
        folder = RunDir()
        try:
            generation = early = 0
            began = time.monotonic()
            while (code := self._run_once(folder.path, generation)) != EXIT_BAD_CONFIGURATION and not self._stopping:
                early = early + 1 if time.monotonic() - began < EARLY_SECONDS else 0
                self._pause(BACKOFF_SECONDS[min(early, len(BACKOFF_SECONDS) - 1)])
                began = time.monotonic()
                generation += 1
            return 0 if self._stopping else code
        finally:
            folder.close()

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._stopping:
            time.sleep(POLL_SECONDS)

    def _run_once(self, folder: Path, generation: int) -> int:
        ranks = EngineProcess(folder, generation, self._config.runtime)
        try:
            ranks.configure(self._config)
            while (code := ranks.exit_code) is None and not self._stopping:
                time.sleep(POLL_SECONDS)
                ranks.kill_if_stalled(self._config.process)
            if code is not None:
                logger.error("the engine's part on this machine %s", ranks.how_it_ended)
            return code or 0
        finally:
            ranks.end()
