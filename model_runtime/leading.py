"""Rank 0's side of a group: it tells the others of each step, and hears what they have done. Owned by the executor,
engine process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from model_runtime.group import StepMeter
from model_runtime.parallel import Mesh
from model_runtime.rank_stats import RankStats
from model_runtime.runner import Runner
from model_runtime.transport import Followers
from scheduler.plan import StepPlan


class OtherRanks:
    """Those that follow this one."""

    def __init__(self, followers: Followers, mesh: Mesh, runner: Runner) -> None:
        self._followers, self._meter = followers, StepMeter(mesh, runner)
        layout = mesh.layout
        first_stage = layout.size // layout.pipeline_size
        self._later_stages = range(first_stage, layout.size)
        self._told_of_ends = range(1, first_stage if layout.pipeline_size > 1 else 1)

    @contextmanager
    def begin(self, plan: StepPlan) -> Iterator[None]:
        """All begin a step."""
        self._followers.send(plan, self._later_stages)
        with self._meter.step():
            yield

    @contextmanager
    def end(self) -> Iterator[None]:
        """The step that began first ends, for which the first stage of a pipeline does something together."""
        self._followers.send_end(self._told_of_ends)
        with self._meter.step(False):
            yield

    @property
    def stats(self) -> tuple[RankStats, ...]:
        """What each rank has done, as far as is known."""
        self._followers.wait_for_reports(0)
        return (self._meter.stats, *self._followers.stats.values())
