"""The supervisor: starts the API and engine processes, watches them, restarts the engine, leaves nothing behind.

The process that `firstlight serve` is. It imports neither torch nor the web framework, so it starts at once and cannot
be blocked by either.
"""

import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import setproctitle
import zmq

from server import wire
from server.child import EXIT_BAD_CONFIGURATION, socket_address, socket_path
from server.children import EngineProcess, describe, start_api
from server.config import ServeConfig
from server.health_port import HealthBoard, HealthServer
from server.memory_guard import MemoryGuard
from server.options import OptionError

logger = logging.getLogger(__name__)

POLL_MS = 50
BACKOFF_SECONDS = (0.0, 0.2, 1.0, 2.0, 5.0, 10.0)
"""Before a start, by the number of starts that failed since one succeeded."""
MAX_FAILED_STARTS = 2
"""Starts that may fail before the first success; one more ends the server."""
MAX_FAILED_RESTARTS = 5
"""Starts in a row that may fail later; one more ends the server. Crashes of an engine that was ready are not counted:
requests that cause them are found out (`replay.py`)."""
SPARE_SECONDS = 1.0
"""After an engine is ready, until the next one is prepared."""
KILL_GRACE_SECONDS = 2.0
EXIT_LOST_SOCKET = 1
EXIT_NO_ENGINE = 1


class Supervisor:
    """One API process and one engine process at a time."""

    def __init__(self, config: ServeConfig, on_message: Callable[[wire.StartReport], None]) -> None:
        self._config, self._on_message = config, on_message
        self._failures = 0
        self._spare: EngineProcess | None = None
        self._restart_at: float | None = None
        self._ready_generation: int | None = None
        """Of the newest engine that was ready."""
        self._ready_at = 0.0
        self._lost_at: float | None = None
        """When the newest engine that was ready ended; None while there is one."""
        self._stop_signals = 0
        self._drain_deadline: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._memory = MemoryGuard(config.process.min_free_memory)
        self._health = HealthBoard(config.process.stall_timeout)
        if config.process.health_port:
            HealthServer(config.process.host, config.process.health_port, self._health)
        self._run_dir = _make_run_dir()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, wire.SUPERVISOR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(socket_address(self._run_dir))
        self._send(wire.Watch())
        self._api = start_api(self._run_dir, config)
        self._engine = self._new_engine(0)
        self._engine.configure(config)

    def _start_next_engine(self) -> None:
        """The spare, if it lives."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.exit_code is not None:
            spare.end()
            spare = None
        self._engine = spare or self._new_engine(self._engine.generation + 1)
        self._engine.configure(self._config)

    def _new_engine(self, generation: int) -> EngineProcess:
        return EngineProcess(self._run_dir, generation, self._config.runtime)

    def _keep_spare(self) -> None:
        """After a loss: what has happened once may happen again, and torch takes a good second to import. Not before:
        a spare takes 150 MB, and it goes while memory is scarce. Not while the streams that waited for the engine want
        the processor."""
        self._memory.look()
        if self._memory.is_scarce:
            self._end_spare()
        elif self._spare is None and self._engine.generation and self._ready_at + SPARE_SECONDS < time.monotonic():
            self._spare = self._new_engine(self._engine.generation + 1)

    def _end_spare(self) -> None:
        if self._spare is not None:
            self._spare.end()
        self._spare = None

    def run(self) -> int:
        """Watch until told to stop or a process fails for good; the exit code of `firstlight serve`."""
        try:
            while (code := self._step()) is None:
                pass
            return code
        finally:
            self._send(wire.Drain(0.0))
            self._api.end(KILL_GRACE_SECONDS)
            self._engine.end()
            self._end_spare()
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signals += 1

    def _step(self) -> int | None:
        if self._socket.poll(POLL_MS):
            self._hear(wire.decode_to_supervisor(self._socket.recv()))
        if (code := self._api.exit_code) is not None:
            return self._api_ended(code)
        if self._stop_signals and (code := self._drain()) is not None:
            return code
        return self._watch_engine()

    def _hear(self, message: wire.ToSupervisor) -> None:
        if isinstance(message, wire.Health):
            self._health.hear(message)
        elif isinstance(message, wire.Broken):
            if message.generation == self._engine.generation:
                self._engine.kill(f"sent nonsense ({message.reason})")
        elif self._ready_generation is None:
            self._on_message(message)
        if isinstance(message, wire.Hello):
            self._ready_generation, self._ready_at, self._failures = message.generation, time.monotonic(), 0
            if self._lost_at is not None:
                logger.info("an engine is back after %.1f s", self._ready_at - self._lost_at)
            self._lost_at = None

    def _api_ended(self, code: int) -> int:
        if self._drain_deadline is not None and code == 0:
            return 0
        if code == EXIT_BAD_CONFIGURATION:
            return code  # it has said what is wrong
        logger.error("the API process ended (%s); stopping", describe(code))
        return 1 if code == 0 else abs(code)

    def _drain(self) -> int | None:
        """First signal: let accepted requests finish. Second signal, or time over: end at once."""
        now = time.monotonic()
        if self._drain_deadline is None:
            timeout = self._config.process.shutdown_timeout
            logger.info("draining: up to %.0f s for accepted requests; signal again to stop at once", timeout)
            self._drain_deadline = now + timeout + KILL_GRACE_SECONDS
            self._send(wire.Drain(timeout))
        if self._stop_signals > 1 or now > self._drain_deadline:
            return 0 if self._stop_signals == 1 else 130
        return None

    def _watch_engine(self) -> int | None:
        code, now = self._engine.exit_code, time.monotonic()
        if code is None:
            self._engine.kill_if_stalled(self._config.process)
            if self._ready_generation == self._engine.generation:
                self._keep_spare()
        elif self._restart_at is None:
            if (final := self._why_no_restart(code)) is not None:
                return final
            self._plan_restart(now)
        elif now >= self._restart_at:
            self._restart_at = None
            self._start_next_engine()
        return None

    def _why_no_restart(self, code: int) -> int | None:
        """The exit code of `firstlight serve` where a new engine would fare no better."""
        if code == EXIT_BAD_CONFIGURATION:
            return code
        if self._ready_generation is not None and not socket_path(self._run_dir).exists():
            logger.error("the engine ended (%s), and %s was deleted; stopping", describe(code), self._run_dir)
            return EXIT_LOST_SOCKET
        if self._ready_generation is None and self._failures >= MAX_FAILED_STARTS:
            logger.error("the engine ended (%s) and was never ready; stopping", describe(code))
            return EXIT_BAD_CONFIGURATION
        if self._failures >= MAX_FAILED_RESTARTS:
            logger.error(
                "the engine ended (%s) before it was ready, %d times; stopping", describe(code), self._failures + 1
            )
            return EXIT_NO_ENGINE
        return None

    def _plan_restart(self, now: float) -> None:
        engine = self._engine
        self._failures += self._ready_generation != engine.generation
        delay = BACKOFF_SECONDS[min(self._failures, len(BACKOFF_SECONDS) - 1)]
        self._restart_at = now + delay
        if self._ready_generation is not None and self._lost_at is None:
            self._lost_at = now
        reason = f"the engine {engine.how_it_ended} and is being restarted"
        logger.error("%s in %.1f s", reason, delay)
        self._send(wire.EngineDown(engine.generation, reason, engine.ended_from_outside))
        engine.end()

    def _send(self, message: wire.ToApi) -> None:
        self._socket.send(wire.encode(message), zmq.NOBLOCK)


def _make_run_dir() -> Path:
    """A private folder for the sockets. Raises OptionError."""
    try:
        path = Path(tempfile.mkdtemp(prefix="firstlight-"))
    except OSError as error:
        raise OptionError(f"cannot make a folder for sockets (TMPDIR says where): {error.strerror}") from None
    if len(os.fsencode(socket_path(path))) > zmq.IPC_PATH_MAX_LEN:
        path.rmdir()
        raise OptionError(f"{path.parent} is too long a path for sockets; set TMPDIR to a shorter one")
    return path


def serve(config: ServeConfig, on_message: Callable[[wire.StartReport], None]) -> int:
    """Run the server until it is told to stop; `on_message` hears of loading and readiness."""
    setproctitle.setproctitle("firstlight: supervisor")
    return Supervisor(config, on_message).run()
