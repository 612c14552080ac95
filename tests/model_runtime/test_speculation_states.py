"""Speculation for models whose layers go through a text with a state: beside checkpoints of states, with a draft model,
and with several ranks. Outputs are the same bit for bit, of several ranks as near as theirs are without drafts.

`test_speculation.py` has more of requests and parameters.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from model_runtime.checkpoint import LoadedModel
from model_runtime.executor import load_executor
from model_runtime.layout import Layout
from model_runtime.parallel import Collectives, Mesh
from scheduler import state_slots
from scheduler.config import SpeculativeConfig
from scheduler.plan import StepPlan, StepResult, ints
from scheduler.request import Request, SamplingParams
from scheduler.scheduler import Scheduler
from tests.checkpoints import HYBRID, make_checkpoint
from tests.family_cases import make_random_model
from tests.model_runtime import test_pipeline, test_ranks
from tests.model_runtime.driver import Outcome, Session
from tests.model_runtime.ranks import mesh_on_shared_memory, on_shared_memory
from tests.model_runtime.test_invariance import load
from tests.model_runtime.test_speculation import ALONE, NGRAM, TOGETHER, Scripted, scripted

MARK = 8
"""Tokens between checkpoints here: most steps with drafts go past one."""
BLOCKS = 33 * 30
RUNTIME = test_pipeline.TEXT_RUNTIME
DRAFTING = replace(test_ranks.SCHEDULER, speculative_config=NGRAM)


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp(request.param)
    make_random_model(folder, request.param, 0)
    return load(folder)


def asked() -> list[Request]:
    """Two choices of each of ten prompts, which begin alike in pairs; greedy and sampled."""
    found = []
    for index in range(20):
        leader, drawn = index // 2 * 2, index % 4 == 3
        prompt = [5 + (leader // 4 * 7 + place) % 40 for place in range(30)] + [60 + leader] * (leader % 7)
        sampling = SamplingParams(max_tokens=20, temperature=float(drawn), seed=index, logprobs=1)
        found.append(
            Request(
                seq_id=index,
                prompt_ids=ints(prompt),
                sampling=sampling,
                leader=None if index == leader else leader,
            )
        )
    return found


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> dict[int, Outcome]:
    session, outcomes = Session(model, ALONE, 16), {}
    for request in asked():
        outcomes |= session.run([replace(request, leader=None)])
    return outcomes


@pytest.mark.parametrize("checkpoints", [3, 200])
def test_texts_go_on_from_checkpoints_behind_drafts(
    model: LoadedModel, alone: dict[int, Outcome], checkpoints: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, first with an empty cache, then from what the first time has left: prompts with all of an output."""
    monkeypatch.setattr(state_slots, "MARK_TOKENS", MARK)
    config = replace(TOGETHER, max_num_seqs=6, max_num_batched_tokens=24, max_state_checkpoints=checkpoints)
    session = scripted(model, config, BLOCKS, alone)
    assert session.run(asked()) == alone
    speculation = session.scheduler.stats().speculation
    assert 40 < speculation.accepted_tokens < speculation.draft_tokens
    longer = [
        replace(request, prompt_ids=request.prompt_ids + ints(alone[request.seq_id].token_ids), leader=None)
        for request in asked()
    ]
    plain = Session(model, ALONE, 16)
    expected = {request.seq_id: plain.run([request])[request.seq_id] for request in longer}
    hits = session.scheduler.stats().prefix_hits
    assert session.run(longer) == expected
    assert session.scheduler.stats().prefix_hits - hits > (20 * 32 if checkpoints == 200 else 0)


def test_a_draft_model_without_states(model: LoadedModel, tmp_path: Path) -> None:
    """At a temperature at which any two models sample the same tokens, mostly."""
    hot = [replace(request, sampling=replace(request.sampling, temperature=30.0)) for request in asked()]
    expected = Session(model, TOGETHER, BLOCKS).run(hot)
    make_checkpoint(tmp_path, "llama", {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48})
    draft = SpeculativeConfig(method="draft", num_speculative_tokens=4, model="somewhere")
    session = Session(model, replace(TOGETHER, speculative_config=draft), BLOCKS, draft=load(tmp_path))
    assert session.run(hot) == expected
    speculation = session.scheduler.stats().speculation
    assert 50 < speculation.accepted_tokens < speculation.draft_tokens


def drafted(folder: Path) -> list[tuple[StepPlan, StepResult]]:
    """Steps of one rank with drafts, some of which hold."""
    types = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    make_checkpoint(folder, "qwen3_next", HYBRID | {"num_hidden_layers": 4, "layer_types": types})
    executor, steps = load_executor(folder, RUNTIME, DRAFTING, lambda stage, done: None), []
    outcomes = Session(load(folder), ALONE, 16).run(asked())
    scheduler = Scheduler(
        DRAFTING, num_blocks=128, max_model_len=256, drafter=Scripted(outcomes), has_states=executor.info.has_states
    )
    for request in asked():
        scheduler.add(request, 0.0)
    while (plan := scheduler.plan(0.0)) is not None:
        steps.append((plan, executor.execute(plan)))
        scheduler.commit(steps[-1][1], 0.0)
    events = scheduler.take_events()
    for index, outcome in outcomes.items():
        assert [token for event in events if event.seq_id == index for token in event.token_ids] == outcome.token_ids
    speculation = scheduler.stats().speculation
    assert 50 < speculation.accepted_tokens < speculation.draft_tokens
    return steps


def test_two_ranks_verify_drafts_as_one(tmp_path: Path) -> None:
    steps = drafted(tmp_path)

    def one(collectives: Collectives) -> list[StepResult]:
        return test_ranks.replayed(tmp_path, RUNTIME, [plan for plan, _ in steps], collectives, DRAFTING)

    for found, (_, expected) in zip(on_shared_memory(2, one)[0], steps, strict=True):
        test_ranks.assert_same(found, expected)


def test_stages_verify_drafts_bit_for_bit_as_one_rank(tmp_path: Path) -> None:
    steps = drafted(tmp_path)

    def one(mesh: Mesh) -> list[StepResult]:
        return test_pipeline.replayed(tmp_path, RUNTIME, [plan for plan, _ in steps], mesh, DRAFTING)

    assert mesh_on_shared_memory(Layout(pipeline_size=3), one)[0] == [result for _, result in steps]
