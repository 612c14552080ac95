"""A rank that follows: it loads its share of the model and computes its part of every plan of rank 0. A process of its
own.

It has no scheduler, no queue and does not sample. A gap between plans, a wrong digest or a lost rank ends it, and with
it the group, which the supervisor starts again.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from model_runtime.config import RuntimeConfig
from model_runtime.device import choose_device
from model_runtime.executor import load_runner
from model_runtime.group import Place, Ranks, StepMeter, meet
from model_runtime.ops import is_compiled, load_ops
from model_runtime.parallel import Mesh
from model_runtime.runner import Begun, Runner
from model_runtime.transport import Leader, StepEnd
from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan, StepResult

POLL_MS = 100
REPORT_SECONDS = 1.0


class Follower:
    """A loaded share and the way to rank 0."""

    def __init__(self, runner: Runner, leader: Leader, mesh: Mesh) -> None:
        self._runner, self._leader, self._meter = runner, leader, StepMeter(mesh, runner)
        self._last_report = 0.0
        self._begun: deque[Begun | StepResult] | None = None
        """Steps that rank 0 has not ended; None where who follows may go on to the end."""
        if mesh.layout.pipeline_size > 1 and mesh.layout.stage == 0:
            self._begun = deque()

    def run(self, on_pass: Callable[[], None]) -> None:
        """Forever; `on_pass` is called whenever the loop comes round, and may raise to end it."""
        while True:
            on_pass()
            message = self._leader.receive(POLL_MS)
            if message is not None:
                with self._meter.step(isinstance(message, StepPlan)):
                    self._follow(message)
            if time.monotonic() - self._last_report > REPORT_SECONDS:
                self._last_report = time.monotonic()
                self._leader.report(self._meter.stats)

    def _follow(self, message: StepPlan | StepEnd) -> None:
        if isinstance(message, StepEnd):
            assert self._begun, "the end of a step that has not begun"
            self._runner.follow_to_end(self._begun.popleft())
        elif self._begun is None:
            self._runner.follow(message)
        else:
            self._begun.append(self._runner.begin(message))


def load_follower(
    model_path: Path, runtime: RuntimeConfig, scheduler: SchedulerConfig, place: Place, wait: Callable[[], None]
) -> Follower:
    """Load this rank's share and wait until rank 0 has loaded its own; `wait` is called meanwhile, and may raise.

    Raises CheckpointError for a model that cannot be read, PlanError for one that does not fit.
    """
    device = choose_device(runtime.device)
    compiled = is_compiled(load_ops(device, runtime.kernels))
    mesh = meet(place, device, compiled, runtime.collective_timeout)
    leader = Leader(place.endpoints, place.layout.rank)
    ranks = Ranks(mesh=mesh, ranks_here=place.ranks_here, agree=partial(leader.agree, wait=wait))
    runner, _ = load_runner(model_path, runtime, scheduler, lambda stage, done: wait(), ranks)
    return Follower(runner, leader, mesh)
