"""Steps that are planned and not committed. Used by `Scheduler`, engine process.

There is one, unless the model is a pipeline: then each of its stages computes another step. A sequence is in one of
them at most, since its next token follows from the last. So sequences are divided among as many steps as there are
stages.
"""

from collections import deque
from typing import NamedTuple

from scheduler.images import ImagePlanner
from scheduler.plan import StepPlan
from scheduler.plan_builder import PlanBuilder, Planned
from scheduler.sequence import Sequence


class _Step(NamedTuple):
    """One of them."""

    step_id: int
    planned: Planned
    encodes: bool


class Flight:
    """Up to `most` steps, which are committed in order."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.last_step = 0
        """Number of the newest step."""
        self._steps: deque[_Step] = deque()

    @property
    def may_begin(self) -> bool:
        """Whether another one may be planned: not behind one that encodes images, since what that gives must be known
        before. Raises AssertionError where there are as many as may be."""
        assert len(self._steps) < self._most, f"step {self.last_step} was planned and not committed"
        return not any(step.encodes for step in self._steps)

    @property
    def seqs(self) -> list[Sequence]:
        """Those that a step computes tokens of."""
        return [seq for step in self._steps for seq in step.planned.seqs]

    @property
    def may_wait(self) -> bool:
        """Whether something is in flight, so that the next step may come later."""
        return len(self._steps) > 0

    def idle(self, running: list[Sequence]) -> list[Sequence]:
        """Those that no step computes tokens of."""
        return [seq for seq in running if not seq.in_flight]

    def share(self, decodes: list[Sequence]) -> list[Sequence]:
        """As many of the idle ones, best first, as the next step may have if each is to have as many."""
        return decodes[: -(-(len(decodes) + len(self.seqs)) // self._most)]

    def last_to_preempt(self, running: list[Sequence], seq: Sequence) -> Sequence | None:
        """The last of the idle ones in rank. None if that is `seq` itself, and steps in flight may give blocks back."""
        last = self.idle(running)[-1]
        return None if last is seq and self.may_wait else last

    def begin(self, builder: PlanBuilder, images: ImagePlanner) -> StepPlan:
        """A step was planned, with what `images` wants to be encoded."""
        self.last_step += 1
        plan, planned = builder.build(self.last_step, *images.take_jobs())
        self._steps.append(_Step(plan.step_id, planned, len(plan.encode.slots) > 0))
        for seq in planned.seqs:
            seq.in_flight = True
        return plan

    def end(self, step_id: int) -> tuple[Planned, bool]:
        """What the step did that comes next, and whether it encoded images."""
        assert self._steps, "a result without a plan"
        step = self._steps[0]
        assert step_id == step.step_id, f"result of step {step_id}, planned was {step.step_id}"
        self._steps.popleft()
        for seq in step.planned.seqs:
            seq.in_flight = False
        return step.planned, step.encodes
