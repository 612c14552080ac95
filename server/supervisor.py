"""The supervisor: starts the API and engine processes, watches them, restarts engines, leaves nothing behind.

The process that `firstlight serve` is. It imports neither torch nor the web framework, so it starts at once and cannot
be blocked by either.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
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
from server.pulse import LONGEST_LOOK
from server.replica import Replica
from server.replica_config import divided
from server.run_dir import RunDir

logger = logging.getLogger(__name__)

POLL_MS = 50
SPARE_SECONDS = 1.0
"""After all engines are ready, until the next one is prepared."""
API_START_SECONDS = 120.0
"""More silence that the API process is allowed before it first reports: it reads the tokenizer."""
API_STALLS = 4
"""Times stall_timeout without a report, until the API process is killed. Probes are told after one; this is for where
nobody looks, for with the process all connections end."""
KILL_GRACE_SECONDS = 2.0
EXIT_STUCK_API = 1
EXIT_LOST_SOCKET = 1


class Supervisor:
    """One API process, and one engine at a time for each replica."""

    def __init__(self, config: ServeConfig, on_message: Callable[[wire.StartReport], None]) -> None:
        self._config, self._on_message = divided(config), on_message
        self._next_generation = 0
        """Of engines, through all replicas."""
        self._spare: EngineProcess | None = None
        self._was_ready = False
        """An engine was."""
        self._stop_signals = 0
        self._drain_deadline: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._memory = MemoryGuard(config.process.min_free_memory)
        self._health = HealthBoard(config.process.stall_timeout)
        self._api_silence, self._looked_at = -API_START_SECONDS, time.monotonic()
        if config.process.health_port:
            HealthServer(config.process.host, config.process.health_port, self._health)
        self._run_dir = _make_run_dir()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, wire.SUPERVISOR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(socket_address(self._run_dir.path))
        self._send(wire.Watch())
        self._api = start_api(self._run_dir.path, self._config)
        numbers = range(config.process.data_parallel_size)
        self._replicas = [Replica(number, self._new_engine(), self._config) for number in numbers]

    def _new_engine(self) -> EngineProcess:
        generation = self._next_generation
        self._next_generation += 1
        return EngineProcess(self._run_dir.path, generation, self._config.runtime)

    def _take_spare(self) -> EngineProcess | None:
        """If it lives."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.exit_code is not None:
            spare.end()
            spare = None
        return spare

    def _keep_spare(self) -> None:
        """After a loss: what has happened once may happen again, and torch takes a good second to import. Not before:
        a spare takes 150 MB, and it goes while memory is scarce. Not while the streams that waited for the engine want
        the processor. One is enough for all replicas."""
        self._memory.look()
        ready_at = max(replica.ready_at for replica in self._replicas)
        if self._memory.is_scarce:
            self._end_spare()
        elif (
            self._spare is None
            and self._next_generation > len(self._replicas)
            and ready_at + SPARE_SECONDS < time.monotonic()
        ):
            self._spare = self._new_engine()

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
            for replica in self._replicas:
                replica.engine.end()
            self._end_spare()
            self._run_dir.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signals += 1

    def _step(self) -> int | None:
        if self._socket.poll(POLL_MS):
            self._hear(wire.decode_to_supervisor(self._socket.recv()))
        if (code := self._api.exit_code) is not None:
            return self._api_ended(code)
        if self._api_is_stuck():
            return EXIT_STUCK_API
        if self._stop_signals and (code := self._drain()) is not None:
            return code
        return self._watch_engines()

    def _hear(self, message: wire.ToSupervisor) -> None:
        if isinstance(message, wire.Health):
            self._health.hear(message)
            self._api_silence = 0.0
        elif isinstance(message, wire.Broken):
            for replica in self._replicas:
                if replica.engine.generation == message.generation:
                    replica.engine.kill(f"sent nonsense ({message.reason})")
        elif not self._was_ready and not (isinstance(message, wire.Loading) and message.replica):
            self._on_message(message)
        if isinstance(message, wire.Hello):
            self._was_ready = True
            self._replicas[message.replica].hear_ready(message.generation)

    def _api_ended(self, code: int) -> int:
        if self._drain_deadline is not None and code == 0:
            return 0
        if code == EXIT_BAD_CONFIGURATION:
            return code  # it has said what is wrong
        logger.error("the API process ended (%s); stopping", describe(code))
        return 1 if code == 0 else abs(code)

    def _api_is_stuck(self) -> bool:
        """Then it is killed. A pause of the whole container counts for nothing, as with engines."""
        now = time.monotonic()
        self._api_silence += min(now - self._looked_at, LONGEST_LOOK)
        self._looked_at = now
        if self._api_silence <= API_STALLS * self._config.process.stall_timeout:
            return False
        logger.error("the API process gave no sign of life for %.0f s and is killed; stopping", self._api_silence)
        self._api.kill()
        return True

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

    def _watch_engines(self) -> int | None:
        for replica in self._replicas:
            if replica.needs_engine:
                replica.start(self._take_spare() or self._new_engine())
            elif (ended := replica.watch()) is not None and (code := self._engine_ended(replica, ended)) is not None:
                return code
        if all(replica.is_ready for replica in self._replicas):
            self._keep_spare()
        return None

    def _engine_ended(self, replica: Replica, code: int) -> int | None:
        """Plan the next one. The exit code of `firstlight serve` where that is hopeless and no other replica is ready;
        as long as one is, there are more attempts."""
        hopeless = replica.why_hopeless(code)
        if self._was_ready and not socket_path(self._run_dir.path).exists():
            hopeless = (
                EXIT_LOST_SOCKET,
                f"{replica.name} ended ({describe(code)}), and {self._run_dir.path} was deleted",
            )
        if hopeless is not None and not any(other.is_ready for other in self._replicas if other is not replica):
            final, reason = hopeless
            if reason:
                logger.error("%s; stopping", reason)
            return final
        engine, reason = replica.engine, replica.plan_restart()
        self._send(wire.EngineDown(engine.generation, reason, engine.ended_from_outside, replica.number))
        engine.end()
        return None

    def _send(self, message: wire.ToApi) -> None:
        self._socket.send(wire.encode(message), zmq.NOBLOCK)


def _make_run_dir() -> RunDir:
    """A private folder for the sockets. Raises OptionError."""
    made = RunDir()
    if len(os.fsencode(socket_path(made.path))) > zmq.IPC_PATH_MAX_LEN:
        made.close()
        raise OptionError(f"{made.path.parent} is too long a path for sockets; set TMPDIR to a shorter one")
    return made


def serve(config: ServeConfig, on_message: Callable[[wire.StartReport], None]) -> int:
    """Run the server until it is told to stop; `on_message` hears of loading and readiness."""
    setproctitle.setproctitle("firstlight: supervisor")
    return Supervisor(config, on_message).run()
