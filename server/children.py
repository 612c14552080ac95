"""The supervisor's children: processes that end when it does, the engine with its pulse, and the engine to come.

Used by `server/supervisor.py`; supervisor process.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from model_runtime.config import RuntimeConfig
from model_runtime.layout import layout_of
from model_runtime.shared_memory import make_region
from server.child import EXIT_ORPHANED
from server.config import ProcessConfig, ServeConfig, to_json
from server.pulse import PulseWatch

OPENMP_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Compute threads sleep while they wait: one that spins on a busy core costs the gateway milliseconds."""

MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Freed blocks of a megabyte go back to the system at once. Otherwise the C library learns from the first images to
keep blocks of up to 32 MiB in each thread's heap: a few photographs leave the API process 100 MB larger for good."""


class Child:
    """A child process and the pipe that tells it what to do, and that the supervisor lives."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[object],
        environment: Mapping[str, str],
        *,
        when_orphaned: signal.Signals,
        inherited: Sequence[int] = (),
    ) -> None:
        """`inherited` are descriptors for it."""
        words = ["-m", "server.child_entry", int(when_orphaned), module, *arguments]
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdin=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **environment},
            start_new_session=True,
            pass_fds=inherited,
        )
        self._pipe: IO[bytes] = self.process.stdin  # type: ignore[assignment]

    def configure(self, config: ServeConfig, replica: int = 0) -> None:
        """What it waits for once it has imported its modules, and to which replica it belongs."""
        with contextlib.suppress(BrokenPipeError):  # it died already, as its exit code will tell
            self._pipe.write(b"%d %b\n" % (replica, to_json(config)))

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self.process.poll()

    def end(self, grace: float) -> None:
        """Wait up to `grace` seconds for it to end by itself, then SIGKILL: children do not heed SIGTERM."""
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()
        self._pipe.close()

    def kill(self) -> None:
        """SIGKILL, at once, for it and for what it started: compilers of kernels would go on for a minute."""
        if self.exit_code is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def start_api(run_dir: Path, config: ServeConfig) -> Child:
    """The API process. Orphaned, it removes the folder of the sockets."""
    api = Child("server.api_process", [run_dir], MALLOC_SETTINGS, when_orphaned=signal.SIGCONT)
    api.configure(config)
    return api


class Rank:
    """A rank of the engine, which imports torch and waits until it is configured; rank 0 is the engine itself."""

    def __init__(self, module: str, arguments: Sequence[object], inherited: Sequence[int]) -> None:
        """The process gets the arguments, among them the pipe of its pulse as the third."""
        self.pulse = PulseWatch()
        run_dir, generation, *others = arguments
        self.child = Child(
            module,
            [run_dir, generation, self.pulse.pipe, *others],
            OPENMP_SETTINGS,
            when_orphaned=signal.SIGKILL,
            inherited=[self.pulse.pipe, *inherited],
        )


class EngineProcess:
    """An engine: one process, or several ranks that begin and end together. On another machine than the first, its
    ranks."""

    def __init__(self, run_dir: Path, generation: int, runtime: RuntimeConfig) -> None:
        """Those ranks that are of this machine, of which 0 is the engine itself."""
        self.generation, self._run_dir = generation, run_dir
        numbers = runtime.own_ranks
        region = make_region(*map(len, layout_of(runtime).areas))
        modules = ["server.rank_process" if number else "server.engine_process" for number in numbers]
        self._ranks = [
            Rank(module, [run_dir, generation, region, number], [region])
            for module, number in zip(modules, numbers, strict=True)
        ]
        os.close(region)
        self._killed_for = ""
        self._is_to_blame = True
        self._ended: tuple[int, int] | None = None
        """Exit code of the rank whose end was the end of all, and its number."""

    def configure(self, config: ServeConfig, replica: int = 0) -> None:
        """It is to load the model and serve as the engine of this replica."""
        for rank in self._ranks:
            rank.child.configure(config, replica)

    @property
    def exit_code(self) -> int | None:
        """None while all ranks run. When one has ended, the others are killed: they cannot go on without it."""
        if self._ended is None:
            ended = [
                (code, number) for number, rank in enumerate(self._ranks) if (code := rank.child.exit_code) is not None
            ]
            if not ended:
                return None
            self._ended = cause(ended)
            self._kill_ranks()
        return self._ended[0]

    def kill_if_stalled(self, limits: ProcessConfig) -> None:
        """A stopped process, one that waits for what never comes, a step without end. To be called several times a
        second."""
        for rank in self._ranks:
            rank.pulse.look()
        if any(rank.pulse.stuck for rank in self._ranks):
            self.kill(f"was stuck in a step for {limits.step_timeout:.0f} s")
        elif max(rank.pulse.silence for rank in self._ranks) > limits.stall_timeout:
            self.kill(f"was silent for {limits.stall_timeout:.0f} s", is_to_blame=False)

    def kill(self, reason: str, *, is_to_blame: bool = True) -> None:
        """At once; `reason` says what it did."""
        if self.exit_code is None and not self._killed_for:
            self._killed_for, self._is_to_blame = reason, is_to_blame
            self._kill_ranks()

    def _kill_ranks(self) -> None:
        for rank in self._ranks:
            rank.child.kill()

    @property
    def how_it_ended(self) -> str:
        """In words; it must have ended."""
        assert self._ended is not None, "the engine runs"
        code, number = self._ended
        return self._killed_for or (f"lost rank {number} ({describe(code)})" if number else f"ended ({describe(code)})")

    @property
    def ended_from_outside(self) -> bool:
        """As far as can be seen."""
        return self.exit_code == -signal.SIGKILL and not (self._killed_for and self._is_to_blame)

    def end(self) -> None:
        """At once, with the files through which the ranks met (`group.local_place`)."""
        for rank in self._ranks:
            rank.child.end(0.0)
            rank.pulse.close()
        for path in self._run_dir.glob(f"g{self.generation}[-.]*"):
            path.unlink(missing_ok=True)


def cause(ended: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Of ranks that have ended, each an exit code and a number, the one whose end was the end of the others: who was
    killed before who ended by itself and so missed it, and that before who says that rank 0 had gone."""
    return min(ended, key=lambda end: (end[0] == EXIT_ORPHANED, end))


def describe(code: int) -> str:
    """An exit code, for people."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
