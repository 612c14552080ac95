"""Plans of a server with one rank, run by stages that each have some of the layers: rank 0 says the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from model_runtime.config import RuntimeConfig
from model_runtime.executor import load_runner
from model_runtime.group import Ranks
from model_runtime.layout import Layout
from model_runtime.memory.budget import PlanError
from model_runtime.micro_batches import num_parts
from model_runtime.parallel import Mesh
from scheduler.config import SchedulerConfig, SpeculativeConfig, SpeculativeMethod
from scheduler.plan import StepPlan, StepResult, ints
from scheduler.request import Request, SamplingParams
from tests.checkpoints import HYBRID, make_checkpoint
from tests.model_runtime import deepseek
from tests.model_runtime.ranks import mesh_on_shared_memory, mesh_on_threads
from tests.model_runtime.test_ranks import (
    RUNTIME,
    SCHEDULER,
    assert_same,
    fifty_prompts,
    make_drafting,
    make_seeing,
    recorded,
    requests,
    served,
)
from tests.vlm import make_vlm

TEXT_RUNTIME = replace(RUNTIME, max_model_len=256)
CROWDED = replace(TEXT_RUNTIME, num_kv_blocks=16)
"""Too few blocks for all of `texts`."""


def texts(count: int, max_tokens: int = 12) -> list[Request]:
    """Of different lengths; every third begins as the first does and is sampled; two are pooled or scored."""
    found = []
    for index in range(count):
        start = 3 if index % 3 == 0 else 5 * index
        prompt = [3 + (start + 7 * place) % 250 for place in range(50 + 11 * index % 40)]
        scored = -1 if index != 1 else 2
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=float(index % 3 == 0), seed=index, logprobs=2, prompt_logprobs=scored
        )
        found.append(Request(seq_id=index, prompt_ids=ints(prompt), sampling=sampling))
    return [
        *found,
        Request(seq_id=count, prompt_ids=ints([9] * 70), sampling=SamplingParams(max_tokens=1), pooling="mean"),
    ]


def replayed(
    folder: Path, runtime: RuntimeConfig, steps: list[StepPlan], mesh: Mesh, config: SchedulerConfig = SCHEDULER
) -> list[StepResult]:
    """The same by this rank; results are rank 0's."""
    ranks = Ranks(mesh=mesh, ranks_here=mesh.layout.size, agree=lambda facts: facts)
    runner, _ = load_runner(folder, runtime, config, lambda stage, done: None, ranks)
    if mesh.layout.rank == 0:
        return [runner.run(plan) for plan in steps]
    for plan in steps:
        runner.follow(plan)
    return []


def make(folder: Path, family: str) -> None:
    if family == "deepseek":
        deepseek.make_model({"num_hidden_layers": 4}).save_pretrained(folder)
    elif family == "qwen3_next":
        types = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
        make_checkpoint(folder, family, HYBRID | {"num_hidden_layers": 4, "layer_types": types})
    else:
        make_checkpoint(folder, family, {"num_hidden_layers": 4})


@pytest.mark.parametrize(
    ("family", "num_stages"),
    [("llama", 2), ("llama", 3), ("gemma3_text", 2), ("deepseek", 3), ("qwen3_next", 3)],
)
def test_stages_say_bit_for_bit_what_one_rank_says(tmp_path: Path, family: str, num_stages: int) -> None:
    """Chunks, hits in the prefix cache, preemption; sampled, scored and pooled, however a step is cut."""
    make(tmp_path, family)
    steps, stats = served(tmp_path, CROWDED, texts(5, max_tokens=36))
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert max(num_parts(len(plan.token_ids), num_stages) for plan, _ in steps) == num_stages

    def one(mesh: Mesh) -> list[StepResult]:
        return replayed(tmp_path, CROWDED, [plan for plan, _ in steps], mesh)

    found = mesh_on_shared_memory(Layout(pipeline_size=num_stages), one)[0]
    assert found == [result for _, result in steps]


@pytest.mark.parametrize("family", ["llama", "deepseek", "qwen3_next"])
def test_ranks_of_a_stage_share_its_layers(tmp_path: Path, family: str) -> None:
    """Over gloo, and between stages too."""
    make(tmp_path, family)
    runtime = replace(TEXT_RUNTIME, kernels="reference")
    steps = recorded(tmp_path, runtime, texts(2, max_tokens=4))

    def one(mesh: Mesh) -> list[StepResult]:
        return replayed(tmp_path, runtime, [plan for plan, _ in steps], mesh)

    found = mesh_on_threads(Layout(tensor_size=2, pipeline_size=2), one)[0]
    for result, (_, expected) in zip(found, steps, strict=True):
        assert_same(result, expected)
        assert list(result.pooled) == pytest.approx(list(expected.pooled), abs=1e-4)


@pytest.mark.parametrize(("name", "tensor_size"), [("llama", 2), ("deepseek", 1), ("llava", 1)])
def test_greedy_tokens_of_fifty_prompts_are_those_of_one_rank(tmp_path: Path, name: str, tensor_size: int) -> None:
    if name == "llava":
        make_vlm(tmp_path, "llava-clip")
    else:
        make(tmp_path, name)
    config = replace(SCHEDULER, max_num_seqs=50, max_num_batched_tokens=256)
    runtime = replace(TEXT_RUNTIME, num_kv_blocks=400)
    steps = recorded(tmp_path, runtime, fifty_prompts(tmp_path, pictures=name == "llava"), config)

    def one(mesh: Mesh) -> list[StepResult]:
        return replayed(tmp_path, runtime, [plan for plan, _ in steps], mesh, config)

    found = mesh_on_shared_memory(Layout(tensor_size=tensor_size, pipeline_size=2), one)[0]
    assert [result.token_ids for result in found] == [result.token_ids for _, result in steps]


@pytest.mark.parametrize("name", ["llava-clip", "qwen3_vl", "gemma3"])
def test_only_the_first_stage_knows_pictures(tmp_path: Path, name: str) -> None:
    make_seeing(tmp_path, name)
    steps = recorded(tmp_path, RUNTIME, requests(tmp_path))
    assert sum(len(plan.encode.slots) for plan, _ in steps) == 2

    def one(mesh: Mesh) -> list[StepResult]:
        return replayed(tmp_path, RUNTIME, [plan for plan, _ in steps], mesh)

    found = mesh_on_shared_memory(Layout(pipeline_size=2), one)[0]
    assert found == [result for _, result in steps]


@pytest.mark.parametrize("method", ["self", "draft", "mtp"])
def test_the_first_stage_drafts(tmp_path: Path, method: SpeculativeMethod) -> None:
    config = replace(SCHEDULER, speculative_config=drafting(tmp_path, method))
    steps = recorded(tmp_path / "model", TEXT_RUNTIME, texts(2, max_tokens=30), config)
    assert any(plan.by_draft_model for plan, _ in steps)

    def one(mesh: Mesh) -> list[StepResult]:
        return replayed(tmp_path / "model", TEXT_RUNTIME, [plan for plan, _ in steps], mesh, config)

    layout = Layout(tensor_size=2, pipeline_size=2)
    for result, (_, expected) in zip(mesh_on_shared_memory(layout, one)[0], steps, strict=True):
        assert_same(result, expected)


def drafting(folder: Path, method: SpeculativeMethod) -> SpeculativeConfig:
    """By one layer where the model's first ones draft."""
    config = make_drafting(folder, method)
    return replace(config, num_draft_layers=1) if method == "self" else config


def test_layers_that_draft_are_in_the_first_stage(tmp_path: Path) -> None:
    config = replace(SCHEDULER, speculative_config=make_drafting(tmp_path, "self"))

    def one(mesh: Mesh) -> None:
        replayed(tmp_path / "model", TEXT_RUNTIME, [], mesh, config)

    with pytest.raises(PlanError, match="num_draft_layers 2 must be at most the 1 layers of the first pipeline stage"):
        mesh_on_shared_memory(Layout(pipeline_size=3), one)
