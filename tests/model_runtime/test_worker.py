"""The loop of a rank that follows, with a runner that only notes what it is asked for."""

import time
from pathlib import Path
from typing import cast

import pytest

from model_runtime.config import RuntimeInfo
from model_runtime.executor import Executor
from model_runtime.group import local_place
from model_runtime.leading import OtherRanks
from model_runtime.parallel import Alone, Collectives, Layout, tensor_mesh
from model_runtime.rank_stats import RankStats
from model_runtime.runner import Runner
from model_runtime.transport import Followers, Leader, PoolFacts
from model_runtime.worker import Follower
from scheduler.plan import StepPlan
from tests.model_runtime.ranks import on_shared_memory
from tests.model_runtime.test_plan_frames import full_plan


class Enough(Exception):
    """Ends the loop of a follower."""


class NotingRunner:
    """In the place of a `Runner`."""

    expert_tokens = 31

    def __init__(self) -> None:
        self.steps: list[int] = []

    def follow(self, plan: StepPlan) -> None:
        self.steps.append(plan.step_id)


def test_plans_are_computed_and_reported(tmp_path: Path) -> None:
    place = local_place(Layout(rank=1, tensor_size=2), tmp_path, 0, 0)
    runner = NotingRunner()

    def enough() -> None:
        if len(runner.steps) == 2:
            raise Enough

    def follow(collectives: Collectives) -> None:
        leader = Leader(place.endpoints, 1)
        leader.agree(PoolFacts(1, 1, 0), lambda: None)
        with pytest.raises(Enough):
            Follower(cast(Runner, runner), leader, tensor_mesh(collectives)).run(enough)
        leader.close()

    def lead() -> tuple[RankStats, ...]:
        """Rank 0 hears of the other without a step of its own."""
        followers = Followers(place.endpoints, 30.0)
        followers.agree(PoolFacts(1, 1, 0), lambda: None)
        for _ in range(2):
            followers.send(full_plan())
        others = OtherRanks(followers, tensor_mesh(Alone()), cast(Runner, runner))
        executor = Executor(cast(Runner, runner), cast(RuntimeInfo, None), others)
        deadline = time.monotonic() + 30.0
        while len(known := executor.ranks) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        followers.close()
        return known

    def one(collectives: Collectives) -> tuple[RankStats, ...]:
        if collectives.rank == 0:
            return lead()
        follow(collectives)
        return ()

    known, _ = on_shared_memory(2, one)
    assert runner.steps == [full_plan().step_id] * 2
    assert [(stats.rank, stats.collectives, stats.expert_tokens) for stats in known] == [(0, 0, 31), (1, 0, 31)]
