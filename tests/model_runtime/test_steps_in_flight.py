"""Ranks with all that is between them, in threads: several steps on their way through the stages of a pipeline."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from model_runtime.config import RuntimeConfig
from model_runtime.executor import Executor, load_runner
from model_runtime.group import Ranks, local_place
from model_runtime.layout import Layout
from model_runtime.leading import OtherRanks
from model_runtime.parallel import Mesh
from model_runtime.shared_collectives import SharedMemoryCollectives
from model_runtime.transport import Endpoints, Followers, Leader, LeaderLost
from model_runtime.worker import Follower
from scheduler.request import Request, TokenEvent
from server.engine import make_scheduler
from tests.checkpoints import make_checkpoint
from tests.model_runtime.ranks import mesh_on_shared_memory
from tests.model_runtime.test_pipeline import TEXT_RUNTIME, texts
from tests.model_runtime.test_ranks import RUNTIME, SCHEDULER, requests
from tests.vlm import make_vlm

Answer = tuple[list[int], list[float], list[float]]


def answers(executor: Executor, asked: list[Request], waits: list[int]) -> dict[int, Answer]:
    """Tokens, their log-probabilities and sums of each request. `waits` gets how many steps were in flight whenever
    one was waited for."""
    scheduler, in_flight = make_scheduler(SCHEDULER, executor.info), 0
    for request in asked:
        scheduler.add(request, 0.0)
    while scheduler.has_work() or in_flight:
        while in_flight < executor.info.steps_in_flight and (plan := scheduler.plan(0.0)) is not None:
            executor.begin(plan)
            in_flight += 1
        waits.append(in_flight)
        in_flight -= 1
        scheduler.commit(executor.end(), 0.0)
    found: dict[int, Answer] = {request.seq_id: ([], [], []) for request in asked}
    events: list[TokenEvent] = scheduler.take_events()
    for event in events:
        tokens, values, sums = found[event.seq_id]
        tokens += event.token_ids
        values += [entry.value for entry in (*event.prompt_logprobs, *event.logprobs)]
        sums += event.pooled
    return found


def on_ranks(
    folder: Path, runtime: RuntimeConfig, layout: Layout, endpoints: Endpoints, asked: list[Request], waits: list[int]
) -> dict[int, Answer]:
    def load(mesh: Mesh, agree: Callable[..., object]) -> Executor:
        ranks = Ranks(mesh=mesh, ranks_here=layout.size, agree=partial(agree, wait=lambda: None))  # type: ignore[arg-type]
        return Executor(*load_runner(folder, runtime, SCHEDULER, lambda stage, done: None, ranks))

    def one(mesh: Mesh) -> dict[int, Answer]:
        if mesh.layout.rank == 0:
            followers = Followers(endpoints, 30.0)
            try:
                alone = load(mesh, followers.agree)
                executor = Executor(alone._runner, alone.info, OtherRanks(followers, mesh, alone._runner))
                return answers(executor, asked, waits)
            finally:
                followers.close()
        leader = Leader(endpoints, mesh.layout.rank)
        with pytest.raises(LeaderLost):
            Follower(load(mesh, leader.agree)._runner, leader, mesh).run(lambda: None)
        leader.close()
        return {}

    return mesh_on_shared_memory(layout, one)[0]


def alone(folder: Path, runtime: RuntimeConfig, asked: list[Request]) -> dict[int, Answer]:
    return answers(Executor(*load_runner(folder, runtime, SCHEDULER, lambda stage, done: None)), asked, [])


@pytest.mark.parametrize("has_room", [True, False])
def test_answers_are_those_of_one_rank(tmp_path: Path, has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last stage cannot send what it has before the first one takes it."""
    if not has_room:
        monkeypatch.setattr(SharedMemoryCollectives, "fits", lambda self, sizes: not sizes)
    make_checkpoint(tmp_path / "model", "llama", {"num_hidden_layers": 4})
    layout, waits = Layout(pipeline_size=3), list[int]()
    endpoints = local_place(layout, tmp_path, 0, 0).endpoints
    found = on_ranks(tmp_path / "model", TEXT_RUNTIME, layout, endpoints, texts(6), waits)
    assert found == alone(tmp_path / "model", TEXT_RUNTIME, texts(6))
    assert sorted(set(waits)) == [1, 2, 3]


def test_ranks_of_the_first_stage_end_steps_together(tmp_path: Path) -> None:
    make_vlm(tmp_path / "model", "llava-clip")
    layout, waits = Layout(tensor_size=2, pipeline_size=2), list[int]()
    endpoints = local_place(layout, tmp_path, 0, 0).endpoints
    asked = requests(tmp_path / "model")
    found = on_ranks(tmp_path / "model", RUNTIME, layout, endpoints, asked, waits)
    expected = alone(tmp_path / "model", RUNTIME, asked)
    for seq_id, (tokens, values, _) in expected.items():
        assert found[seq_id][0] == tokens
        assert found[seq_id][1] == pytest.approx(values, abs=1e-4)
    assert max(waits) == 2
