"""Plans of a server with one rank, run by ranks that share sequences: rank 0 says the same."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from model_runtime.config import RuntimeConfig
from model_runtime.executor import load_runner
from model_runtime.group import ALONE, Ranks
from model_runtime.layout import Layout
from model_runtime.memory.budget import PlanError
from model_runtime.memory.steps import activation_bytes, shared_attention_bytes
from model_runtime.parallel import Mesh
from scheduler.config import MAX_BLOCK_SIZE, SchedulerConfig, SpeculativeMethod
from scheduler.plan import StepPlan, StepResult, ints
from scheduler.request import Pooling, Request, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.model_runtime.memory import measured_bytes
from tests.model_runtime.ranks import mesh_on_shared_memory, mesh_on_threads
from tests.model_runtime.test_executor import make_plan
from tests.model_runtime.test_ranks import (
    MANY,
    RUNTIME,
    SCHEDULER,
    assert_same,
    assert_same_tokens,
    make_drafting,
    make_seeing,
    recorded,
    recorded_fifty,
    requests,
)

PAIR, BOTH = Layout(context_size=2), Layout(tensor_size=2, context_size=2)
STAGES = Layout(context_size=2, pipeline_size=2)
WIDE = replace(SCHEDULER, block_size=2 * SCHEDULER.block_size)
"""For one rank: blocks as large as those of two together."""
SHARED = replace(RUNTIME, context_parallel_size=2)


def run_by(
    layout: Layout, folder: Path, runtime: RuntimeConfig, steps: list[StepPlan], config: SchedulerConfig
) -> list[StepResult]:
    """The steps' results on rank 0, each rank with half of every block."""
    config = replace(config, block_size=config.block_size // 2)

    def one(mesh: Mesh) -> list[StepResult]:
        ranks = Ranks(mesh=mesh, ranks_here=layout.size, agree=lambda facts: facts)
        runner, info = load_runner(folder, runtime, config, lambda stage, done: None, ranks)
        assert info.block_size == 2 * config.block_size
        if mesh.layout.rank == 0:
            return [runner.run(plan) for plan in steps]
        for plan in steps:
            runner.follow(plan)
        return []

    return (mesh_on_shared_memory if runtime.kernels == "auto" else mesh_on_threads)(layout, one)[0]


def assert_shared(
    layout: Layout, folder: Path, runtime: RuntimeConfig, asked: list[Request], config: SchedulerConfig
) -> list[StepPlan]:
    """Ranks compute what one does; its steps."""
    steps = recorded(folder, replace(runtime, context_parallel_size=1), asked, config)
    plans = [plan for plan, _ in steps]
    for result, (_, expected) in zip(run_by(layout, folder, runtime, plans, config), steps, strict=True):
        assert_same(result, expected)
        assert list(result.pooled) == pytest.approx(list(expected.pooled), abs=1e-3)
    return plans


@pytest.mark.parametrize(("name", "layout"), [("llava-clip", BOTH), ("qwen3_vl", PAIR), ("gemma3", STAGES)])
def test_texts_and_pictures_are_answered_as_by_one_rank(tmp_path: Path, name: str, layout: Layout) -> None:
    make_seeing(tmp_path, name)
    plans = assert_shared(layout, tmp_path, SHARED, requests(tmp_path), WIDE)
    assert sum(len(plan.encode.slots) for plan in plans) == 2


@pytest.mark.parametrize(
    ("name", "layout", "whole_experts"),
    [("llama", BOTH, False), ("mixture", STAGES, False), ("mixture", PAIR, True), ("llava", PAIR, False)],
)
def test_greedy_tokens_of_fifty_prompts_are_those_of_one_rank(
    tmp_path: Path, name: str, layout: Layout, whole_experts: bool
) -> None:
    runtime, config = replace(SHARED, max_model_len=256, num_kv_blocks=400), replace(MANY, block_size=32)
    steps = recorded_fifty(tmp_path, name, replace(runtime, context_parallel_size=1), config)
    runtime = replace(runtime, enable_expert_parallel=whole_experts)
    assert_same_tokens(run_by(layout, tmp_path, runtime, [plan for plan, _ in steps], config), steps)


@pytest.mark.parametrize(("method", "layout"), [("self", PAIR), ("draft", PAIR), ("mtp", STAGES)])
def test_ranks_draft_together(tmp_path: Path, method: SpeculativeMethod, layout: Layout) -> None:
    config = replace(WIDE, speculative_config=make_drafting(tmp_path, method))
    asked = [
        Request(seq_id=index, prompt_ids=ints(text), sampling=SamplingParams(max_tokens=40, temperature=0.0))
        for index, text in enumerate(([9] * 20, list(range(3, 40))))
    ]
    plans = assert_shared(layout, tmp_path / "model", replace(SHARED, max_model_len=256), asked, config)
    assert any(plan.by_draft_model for plan in plans)


def test_chunks_hits_of_the_prefix_cache_and_preemption(tmp_path: Path) -> None:
    """In a pool that does not hold all of them."""
    make_checkpoint(tmp_path, "llama", {})
    config = replace(WIDE, enable_prefix_caching=True)
    runtime = replace(SHARED, max_model_len=256, num_kv_blocks=8)
    texts = [list(range(3, 103)), [*range(3, 83), 7, 8, 9], [5] * 70]
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    asked = [Request(seq_id=index, prompt_ids=ints(text), sampling=sampling) for index, text in enumerate(texts)]
    plans = assert_shared(PAIR, tmp_path, runtime, asked, config)
    fresh = [kv - query for plan in plans for query, kv in zip(plan.query_lens, plan.kv_lens, strict=True)]
    assert fresh.count(0) > 1, "nothing was preempted"
    assert max(max(plan.query_lens) for plan in plans) > 1 and sum(map(len, texts)) > config.max_num_batched_tokens


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_what_is_pooled_is_that_of_one_rank(tmp_path: Path, pooling: Pooling) -> None:
    make_checkpoint(tmp_path, "qwen3", {})
    asked = [
        Request(seq_id=index, prompt_ids=ints(text), sampling=SamplingParams(max_tokens=1), pooling=pooling)
        for index, text in enumerate((list(range(3, 103)), [5] * 20))
    ]
    runtime = replace(SHARED, max_model_len=256, kernels="reference")
    plans = assert_shared(PAIR, tmp_path, runtime, asked, WIDE)
    assert any(plan.pool.rows for plan in plans)


def test_ranks_take_the_memory_that_is_planned(tmp_path: Path) -> None:
    """In a step of one prompt, of which each has a half, within 10 %."""
    make_checkpoint(tmp_path, "llama", {"vocab_size": 5000, "intermediate_size": 512, "max_position_embeddings": 1024})
    runtime, config = RuntimeConfig(context_parallel_size=2), SchedulerConfig(max_num_seqs=2, block_size=16)
    plan, architectures = make_plan(1024, 1, 0.0), []

    def one(mesh: Mesh) -> int:
        ranks = Ranks(mesh=mesh, ranks_here=2, agree=lambda facts: facts)
        runner, _ = load_runner(tmp_path, runtime, config, lambda stage, done: None, ranks)
        architectures.append(runner._model.own)  # type: ignore[attr-defined]
        if mesh.layout.rank == 0:
            return measured_bytes(lambda: runner.run(plan))[0]
        runner.follow(plan)
        return 0

    peak = mesh_on_shared_memory(PAIR, one)[0]
    own, attention = activation_bytes(architectures[0], 512, 1), shared_attention_bytes(architectures[0], 1024, 1024)
    assert peak == pytest.approx(own + attention, rel=0.1)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {})
    load: Callable[..., object] = lambda runtime, block_size: load_runner(  # noqa: E731
        tmp_path, runtime, replace(SCHEDULER, block_size=block_size), lambda stage, done: None, ALONE
    )
    with pytest.raises(PlanError, match="context_parallel_size above 1 is only for serve and engine_bench"):
        load(SHARED, 16)
    for block_size in (24, 512):
        with pytest.raises(PlanError, match=f"block_size must be a power of two from 1 to 256, not {block_size}"):
            load(RUNTIME, block_size)
    with pytest.raises(ValueError, match=f"block_size must be from 1 to {MAX_BLOCK_SIZE}"):
        replace(SCHEDULER, block_size=MAX_BLOCK_SIZE + 1)
    with pytest.raises(ValueError, match="context_parallel_size must be from 1 to 64"):
        replace(RUNTIME, context_parallel_size=65)
    with pytest.raises(ValueError, match="times pipeline_parallel_size must be at most 64"):
        replace(RUNTIME, context_parallel_size=33, tensor_parallel_size=2)
