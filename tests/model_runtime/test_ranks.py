"""Plans of a server with one rank, run by two: rank 0 says the same, and has what it needs from the other."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from model_runtime.config import RuntimeConfig
from model_runtime.executor import load_executor, load_runner
from model_runtime.group import Ranks
from model_runtime.parallel import Alone, Collectives, tensor_mesh
from model_runtime.transport import PoolFacts
from scheduler.config import SchedulerConfig, SpeculativeConfig, SpeculativeMethod
from scheduler.plan import StepPlan, StepResult, ints
from scheduler.request import Request, SamplingParams
from scheduler.stats import SchedulerStats
from server.engine import make_scheduler
from tests.adapters import write_adapter
from tests.checkpoints import make_checkpoint, make_model
from tests.model_runtime import deepseek
from tests.model_runtime.next_token import make as make_predicting
from tests.model_runtime.ranks import on_shared_memory, on_threads
from tests.model_runtime.test_tensor_parallel import First, Last
from tests.vision.preprocess_pictures import as_pil, picture
from tests.vlm import make_vlm
from tests.vlm_engine import Gateway, request

SCHEDULER = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=48, block_size=16, prefill_share=1.0)
RUNTIME = RuntimeConfig(max_model_len=512, num_kv_blocks=128, memory_budget=2**30, encoder_cache_bytes=2**20, threads=1)
STEPS = 12


def make_seeing(folder: Path, name: str) -> None:
    """A checkpoint that takes images, one of them with an adapter for these."""
    model = make_vlm(folder, name)
    if name == "llava-clip":
        write_adapter(folder, model)


def requests(folder: Path) -> list[Request]:
    """Two with pictures, of which one has the other's too, and a text that is sampled."""
    gateway, shown = Gateway(folder), [as_pil(picture(90, 60, 0)), as_pil(picture(50, 80, 1))]
    both = [{"type": "image"}, {"type": "text", "text": "or "}, {"type": "image"}]
    prompts = [
        gateway.prompt([{"role": "user", "content": both}], shown),
        gateway.prompt([{"role": "user", "content": [*both[1:], {"type": "text", "text": "?"}]}], shown[1:]),
    ]
    found = [request(index, prompt, STEPS, scored=index == 0) for index, prompt in enumerate(prompts)]
    sampling = SamplingParams(max_tokens=STEPS, temperature=0.8, seed=5, logprobs=3)
    return [*found, Request(seq_id=2, prompt_ids=ints(list(range(3, 80))), sampling=sampling)]


def recorded(
    folder: Path, runtime: RuntimeConfig, requests: list[Request], config: SchedulerConfig = SCHEDULER
) -> list[tuple[StepPlan, StepResult]]:
    """Each step of an engine with one rank."""
    return served(folder, runtime, requests, config)[0]


def served(
    folder: Path, runtime: RuntimeConfig, requests: list[Request], config: SchedulerConfig = SCHEDULER
) -> tuple[list[tuple[StepPlan, StepResult]], SchedulerStats]:
    """As `recorded`, and what the scheduler counted."""
    executor, steps = load_executor(folder, runtime, config, lambda stage, done: None), []
    scheduler = make_scheduler(config, executor.info)
    for one in requests:
        scheduler.add(one, 0.0)
    for _ in range(200):
        plan = scheduler.plan(0.0) if scheduler.has_work() else None
        if plan is None:
            return steps, scheduler.stats()
        steps.append((plan, executor.execute(plan)))
        scheduler.commit(steps[-1][1], 0.0)
    raise AssertionError("the requests do not end")


def replayed(
    folder: Path, runtime: RuntimeConfig, steps: list[StepPlan], collectives: Collectives, config: SchedulerConfig
) -> list[StepResult]:
    """The same by this rank; results are rank 0's."""
    ranks = Ranks(mesh=tensor_mesh(collectives), ranks_here=2, agree=lambda facts: facts)
    runner, _ = load_runner(folder, runtime, config, lambda stage, done: None, ranks)
    if collectives.rank == 0:
        return [runner.run(plan) for plan in steps]
    for plan in steps:
        runner.follow(plan)
    return []


def assert_same(found: StepResult, expected: StepResult) -> None:
    assert (found.step_id, found.token_ids, found.failed_slots) == (
        expected.step_id,
        expected.token_ids,
        expected.failed_slots,
    )
    for mine, alone in ((found.sampled, expected.sampled), (found.scored, expected.scored)):
        assert mine.top_offsets == alone.top_offsets
        assert list(mine.chosen) == pytest.approx(list(alone.chosen), abs=1e-4)


@pytest.mark.parametrize(("name", "kernels"), [("llava-clip", "auto"), ("qwen3_vl", "reference"), ("gemma3", "auto")])
def test_texts_and_pictures_are_answered_as_by_one_rank(tmp_path: Path, name: str, kernels: str) -> None:
    make_seeing(tmp_path, name)
    runtime = replace(RUNTIME, kernels=kernels)
    steps = recorded(tmp_path, runtime, requests(tmp_path))
    assert sum(len(plan.encode.slots) for plan, _ in steps) == 2

    def one(collectives: Collectives) -> list[StepResult]:
        return replayed(tmp_path, runtime, [plan for plan, _ in steps], collectives, SCHEDULER)

    found = on_shared_memory(2, one)[0] if kernels == "auto" else on_threads(2, one)[0]
    for result, (_, expected) in zip(found, steps, strict=True):
        assert_same(result, expected)


def fifty_prompts(folder: Path, *, pictures: bool) -> list[Request]:
    """Greedy; every fifth with a picture, if there are to be any."""
    numbers, found = random.Random(5), []
    gateway, shown = (Gateway(folder), as_pil(picture(60, 40, 2))) if pictures else (None, None)
    for index in range(50):
        if gateway is not None and shown is not None and index % 5 == 0:
            content = [{"type": "image"}, {"type": "text", "text": f"{numbers.random()}"}]
            found.append(request(index, gateway.prompt([{"role": "user", "content": content}], [shown]), STEPS))
        else:
            ids = ints([numbers.randrange(3, 250) for _ in range(numbers.randrange(1, 24))])
            sampling = SamplingParams(max_tokens=STEPS, temperature=0.0)
            found.append(Request(seq_id=index, prompt_ids=ids, sampling=sampling))
    return found


MANY = replace(SCHEDULER, max_num_seqs=50, max_num_batched_tokens=256)


def recorded_fifty(
    folder: Path, name: str, runtime: RuntimeConfig, config: SchedulerConfig
) -> list[tuple[StepPlan, StepResult]]:
    """Of a checkpoint that is made here."""
    if name == "llama":
        make_checkpoint(folder, "llama", {})
    elif name == "llava":
        make_vlm(folder, "llava-clip")
    else:
        deepseek.make_model({}).save_pretrained(folder)
    return recorded(folder, runtime, fifty_prompts(folder, pictures=name == "llava"), config)


def assert_same_tokens(found: list[StepResult], steps: list[tuple[StepPlan, StepResult]]) -> None:
    tokens = [token for _, result in steps for token in result.token_ids]
    assert len(tokens) == 50 * STEPS and len(set(tokens)) > 50
    assert [result.token_ids for result in found] == [result.token_ids for _, result in steps]


@pytest.mark.parametrize("name", ["llama", "mixture", "mixture, whole experts", "llava"])
def test_greedy_tokens_of_fifty_prompts_are_those_of_one_rank(tmp_path: Path, name: str) -> None:
    runtime = replace(RUNTIME, max_model_len=256, num_kv_blocks=400)
    steps = recorded_fifty(tmp_path, name, runtime, MANY)
    shared = replace(runtime, enable_expert_parallel=name == "mixture, whole experts")

    def one(collectives: Collectives) -> list[StepResult]:
        return replayed(tmp_path, shared, [plan for plan, _ in steps], collectives, MANY)

    assert_same_tokens(on_shared_memory(2, one)[0], steps)


def make_drafting(folder: Path, method: SpeculativeMethod) -> SpeculativeConfig:
    """A checkpoint in `model`, beside it a draft model if there must be one, or a layer for multi-token prediction."""
    if method == "mtp":
        (folder / "model").mkdir()
        make_predicting(folder / "model")
        return SpeculativeConfig(method=method, num_speculative_tokens=3)
    make_checkpoint(folder / "model", "llama", {})
    if method == "self":
        return SpeculativeConfig(method=method, num_speculative_tokens=3, num_draft_layers=2)
    make_checkpoint(folder / "draft", "llama", {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64})
    return SpeculativeConfig(method=method, num_speculative_tokens=3, model=str(folder / "draft"))


@pytest.mark.parametrize("method", ["self", "draft", "mtp"])
def test_ranks_draft_together(tmp_path: Path, method: SpeculativeMethod) -> None:
    """By shares of the model's first layers, of a draft model, or of a layer for multi-token prediction."""
    config = replace(SCHEDULER, speculative_config=make_drafting(tmp_path, method))
    runtime = replace(RUNTIME, max_model_len=256)
    asked = [
        Request(seq_id=index, prompt_ids=ints(text), sampling=SamplingParams(max_tokens=30, temperature=0.0))
        for index, text in enumerate(([9] * 20, list(range(3, 40))))
    ]
    steps = recorded(tmp_path / "model", runtime, asked, config)
    assert any(plan.by_draft_model for plan, _ in steps)

    def one(collectives: Collectives) -> list[StepResult]:
        return replayed(tmp_path / "model", runtime, [plan for plan, _ in steps], collectives, config)

    for result, (_, expected) in zip(on_shared_memory(2, one)[0], steps, strict=True):
        assert_same(result, expected)


class Facts(Exception):
    """Ends loading where ranks agree."""

    def __init__(self, facts: PoolFacts) -> None:
        self.facts = facts


def likeness(folder: Path, runtime: RuntimeConfig, config: SchedulerConfig, rank: Alone) -> str:
    """What the rank tells the others of itself."""

    def agree(facts: PoolFacts) -> PoolFacts:
        raise Facts(facts)

    with pytest.raises(Facts) as told:
        load_runner(
            folder, runtime, config, lambda *told: None, Ranks(mesh=tensor_mesh(rank), ranks_here=2, agree=agree)
        )
    return told.value.facts.likeness


def test_ranks_are_alike_if_they_compute_the_same(tmp_path: Path) -> None:
    """Memory and threads may differ."""
    for name, overrides in {"model": {}, "wider": {"intermediate_size": 160}}.items():
        make_checkpoint(tmp_path / name, "llama", overrides)
    make_model("llama", {}, seed=1).save_pretrained(tmp_path / "other")
    own, runtime = tmp_path / "model", replace(RUNTIME, max_model_len=256)
    first = likeness(own, runtime, SCHEDULER, First())
    assert first == likeness(own, replace(runtime, threads=2, num_kv_blocks=64), SCHEDULER, Last())
    others = {
        likeness(tmp_path / "wider", runtime, SCHEDULER, Last()),
        likeness(tmp_path / "other", runtime, SCHEDULER, Last()),
        likeness(own, replace(runtime, kv_cache_dtype="int8"), SCHEDULER, Last()),
        likeness(own, runtime, replace(SCHEDULER, block_size=32), Last()),
    }
    assert len(others - {first}) == 4
