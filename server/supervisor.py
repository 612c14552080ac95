"""The supervisor: starts the API and engine processes, watches them, restarts the engine, leaves nothing behind.

The process that `firstlight serve` is. It imports neither torch nor the web framework, so it starts at once and cannot
be blocked by either.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

import setproctitle
import zmq

from server import wire
from server.child import EXIT_BAD_CONFIGURATION, socket_address, socket_path
from server.config import ServeConfig, to_json
from server.options import OptionError
from server.pulse import PulseWatch

logger = logging.getLogger(__name__)

POLL_MS = 50
BACKOFF_SECONDS = (0.0, 0.2, 1.0, 2.0, 5.0, 10.0)
"""Before a start, by the number of starts that failed since one succeeded."""
MAX_FAILED_STARTS = 2
"""Starts that may fail before the first success; one more ends the server."""
MAX_FAILED_RESTARTS = 5
"""Starts in a row that may fail later; one more ends the server. Crashes of an engine that was ready are not counted:
requests that cause them are found out (`replay.py`)."""
KILL_GRACE_SECONDS = 2.0
EXIT_LOST_SOCKET = 1
EXIT_NO_ENGINE = 1

OPENMP_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Compute threads sleep while they wait: one that spins on a busy core costs the gateway milliseconds."""

MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Freed blocks of a megabyte go back to the system at once. Otherwise the C library learns from the first images to
keep blocks of up to 32 MiB in each thread's heap: a few photographs leave the API process 100 MB larger for good."""


class Child:
    """A child process and the pipe that tells it that the supervisor lives. `inherited` are descriptors for it."""

    def __init__(
        self,
        module: str,
        arguments: list[str],
        config: ServeConfig,
        environment: Mapping[str, str],
        inherited: Sequence[int] = (),
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **environment},
            start_new_session=True,
            pass_fds=inherited,
        )
        self._pipe: IO[bytes] = self.process.stdin  # type: ignore[assignment]
        with contextlib.suppress(BrokenPipeError):  # it died already, as its exit code will tell
            self._pipe.write(to_json(config) + b"\n")

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self.process.poll()

    def end(self, grace: float) -> None:
        """Wait up to `grace` seconds for it to end by itself, then SIGKILL: children do not heed SIGTERM."""
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._pipe.close()


class Supervisor:
    """One API process and one engine process at a time."""

    def __init__(self, config: ServeConfig, on_message: Callable[[wire.ToSupervisor], None]) -> None:
        self._config, self._on_message = config, on_message
        self._generation = 0
        self._failures = 0
        self._restart_at: float | None = None
        self._ready: wire.Hello | None = None
        self._stop_signals = 0
        self._drain_deadline: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._run_dir = _make_run_dir()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, wire.SUPERVISOR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(socket_address(self._run_dir))
        self._send(wire.Watch())
        self._api = Child("server.api_process", [str(self._run_dir)], config, MALLOC_SETTINGS)
        self._start_engine()

    def _start_engine(self) -> None:
        self._pulse, self._stall = PulseWatch(), ""
        arguments = [str(self._run_dir), str(self._generation), str(self._pulse.pipe)]
        self._engine = Child("server.engine", arguments, self._config, OPENMP_SETTINGS, [self._pulse.pipe])

    def run(self) -> int:
        """Watch until told to stop or a process fails for good; the exit code of `firstlight serve`."""
        try:
            while (code := self._step()) is None:
                pass
            return code
        finally:
            self._send(wire.Drain(0.0))
            self._api.end(KILL_GRACE_SECONDS)
            self._engine.end(0.0)
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signals += 1

    def _step(self) -> int | None:
        if self._socket.poll(POLL_MS):
            message = wire.decode_to_supervisor(self._socket.recv())
            if isinstance(message, wire.Hello):
                self._ready, self._failures = message, 0
            self._on_message(message)
        if (code := self._api.exit_code) is not None:
            return self._api_ended(code)
        if self._stop_signals and (code := self._drain()) is not None:
            return code
        return self._watch_engine()

    def _api_ended(self, code: int) -> int:
        if self._drain_deadline is not None and code == 0:
            return 0
        if code == EXIT_BAD_CONFIGURATION:
            return code  # it has said what is wrong
        logger.error("the API process ended (%s); stopping", _describe(code))
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
            self._kill_if_stalled()
        elif self._restart_at is None:
            if (final := self._why_no_restart(code)) is not None:
                return final
            self._plan_restart(code, now)
        elif now >= self._restart_at:
            self._restart_at = None
            self._generation += 1
            self._start_engine()
        return None

    def _kill_if_stalled(self) -> None:
        """A stopped process, one that waits for what never comes, a step without end."""
        self._pulse.look()
        limits = self._config.process
        if self._stall:
            return
        if self._pulse.stuck:
            self._stall = f"was stuck in a step for {limits.step_timeout:.0f} s"
        elif self._pulse.silence > limits.stall_timeout:
            self._stall = f"was silent for {limits.stall_timeout:.0f} s"
        if self._stall:
            self._engine.process.kill()

    def _why_no_restart(self, code: int) -> int | None:
        """The exit code of `firstlight serve` where a new engine would fare no better."""
        if code == EXIT_BAD_CONFIGURATION:
            return code
        if self._ready is not None and not socket_path(self._run_dir).exists():
            logger.error("the engine ended (%s), and %s was deleted; stopping", _describe(code), self._run_dir)
            return EXIT_LOST_SOCKET
        if self._ready is None and self._failures >= MAX_FAILED_STARTS:
            logger.error("the engine ended (%s) and was never ready; stopping", _describe(code))
            return EXIT_BAD_CONFIGURATION
        if self._failures >= MAX_FAILED_RESTARTS:
            logger.error(
                "the engine ended (%s) before it was ready, %d times; stopping", _describe(code), self._failures + 1
            )
            return EXIT_NO_ENGINE
        return None

    def _plan_restart(self, code: int, now: float) -> None:
        was_ready = self._ready is not None and self._ready.generation == self._generation
        self._failures += not was_ready
        delay = BACKOFF_SECONDS[min(self._failures, len(BACKOFF_SECONDS) - 1)]
        self._restart_at = now + delay
        self._engine.end(0.0)
        reason = f"the engine {self._stall or f'ended ({_describe(code)})'} and is being restarted"
        logger.error("%s in %.1f s", reason, delay)
        from_outside = code == -signal.SIGKILL and not self._pulse.stuck
        self._send(wire.EngineDown(self._generation, reason, from_outside))
        self._pulse.close()

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


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def serve(config: ServeConfig, on_message: Callable[[wire.ToSupervisor], None]) -> int:
    """Run the server until it is told to stop; `on_message` hears of loading and readiness."""
    setproctitle.setproctitle("firstlight: supervisor")
    return Supervisor(config, on_message).run()
