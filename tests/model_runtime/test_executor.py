"""Start-up: how the KV pool is sized, what is refused, and whether the plan for memory is what a step takes."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from model_runtime.config import KVCacheDtype, RuntimeConfig
from model_runtime.executor import Executor, load_executor, load_runner
from model_runtime.group import Ranks
from model_runtime.layout import Layout
from model_runtime.memory.budget import PlanError, PoolSize, size_pool
from model_runtime.memory.steps import activation_bytes
from model_runtime.parallel import Mesh, tensor_mesh
from model_runtime.share import split
from model_runtime.shared_collectives import SharedMemoryCollectives
from scheduler.config import SchedulerConfig
from scheduler.plan import ScoreRows, StepPlan, ints
from tests.checkpoints import make_checkpoint
from tests.model_runtime.memory import MODEL, measured_bytes
from tests.model_runtime.ranks import mesh_on_shared_memory, on_shared_memory
from tests.model_runtime.sampling_case import Row, to_plan

SCHEDULER = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=100, block_size=16)
WEIGHTS, BLOCK = 1_000_000, 8192
ACTIVATIONS = activation_bytes(MODEL, 100, 4)


def pool(runtime: RuntimeConfig, budget: int) -> PoolSize:
    return size_pool(
        MODEL, runtime, SCHEDULER, budget=budget, weight_bytes=WEIGHTS, block_bytes=BLOCK, step=ACTIVATIONS
    )


def test_pool_is_what_the_budget_leaves() -> None:
    budget = WEIGHTS + ACTIVATIONS + 100 * BLOCK
    assert pool(RuntimeConfig(), budget) == PoolSize(num_blocks=100, max_model_len=1024)
    assert pool(RuntimeConfig(), budget - 1).num_blocks == 99


def test_pool_is_no_larger_than_the_sequences_can_use() -> None:
    assert pool(RuntimeConfig(), 10**12).num_blocks == 4 * 64
    assert pool(RuntimeConfig(max_model_len=100), 10**12) == PoolSize(num_blocks=4 * 7, max_model_len=100)


def test_number_of_blocks_can_be_given() -> None:
    assert pool(RuntimeConfig(num_kv_blocks=64), 0).num_blocks == 64
    assert pool(RuntimeConfig(num_kv_blocks=5, max_model_len=80), 0) == PoolSize(num_blocks=5, max_model_len=80)


def test_refusals_say_the_numbers_and_the_remedy() -> None:
    with pytest.raises(PlanError, match="max_model_len 1025 exceeds the 1024 positions"):
        pool(RuntimeConfig(max_model_len=1025), 10**12)
    with pytest.raises(
        PlanError, match=r"needs 64 KV blocks.*room for 63 .*set max_model_len to at most 1008"
    ) as error:
        pool(RuntimeConfig(), WEIGHTS + ACTIVATIONS + 63 * BLOCK)
    assert "raise memory_budget" in str(error.value)
    (needed_mib,) = map(int, re.findall(r"with all else (\d+) MiB", str(error.value)))
    assert pool(RuntimeConfig(), needed_mib * 2**20).num_blocks >= 64
    assert (needed_mib - 1) * 2**20 < WEIGHTS + ACTIVATIONS + 64 * BLOCK
    with pytest.raises(PlanError, match=r"room for 0 .*raise memory_budget$"):
        pool(RuntimeConfig(), WEIGHTS)
    with pytest.raises(PlanError, match=r"room for 63 \(num_kv_blocks 63.*raise num_kv_blocks, or set"):
        pool(RuntimeConfig(num_kv_blocks=63), 10**12)
    assert pool(RuntimeConfig(max_model_len=1008), WEIGHTS + ACTIVATIONS + 63 * BLOCK).num_blocks == 63


# A real start


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    make_checkpoint(
        folder,
        "llama",
        {"vocab_size": 5000, "intermediate_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 1024},
    )
    return folder


@pytest.fixture(scope="module")
def executor(checkpoint: Path) -> Executor:
    scheduler = SchedulerConfig(max_num_seqs=2, block_size=32)
    return load_executor(checkpoint, RuntimeConfig(threads=2), scheduler, lambda stage, fraction: None)


def make_plan(tokens: int, rows: int, temperature: float) -> StepPlan:
    """One sequence from its start; the first rows are sampled, with every option on."""
    row = Row(
        temperature=temperature,
        top_p=0.99,
        seed=7,
        presence=0.1,
        frequency=0.1,
        repetition=1.1,
        output=(5,),
        bias=((6, 0.5),),
        top_logprobs=5,
    )
    return StepPlan(
        step_id=1,
        token_ids=ints([index % 5000 for index in range(tokens)]),
        query_lens=ints([tokens]),
        kv_lens=ints([tokens]),
        block_tables=ints(list(range(-(-tokens // 32)))),
        sample=to_plan([replace(row, counter=index) for index in range(rows)]),
        score=ScoreRows(),
    )


def test_info_is_what_was_learned(executor: Executor) -> None:
    info = executor.info
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (1024, 5000, (2,))
    assert (info.num_blocks, info.block_size) == (64, 32)
    assert (
        info.kv_bytes == 64 * 2 * 2 * 2 * 16 * 32 * 4
    )  # blocks, key and value, layers, heads, channels, tokens, bytes
    assert info.weight_bytes > 5000 * 64 * 4
    assert "llama" in info.description


def test_executes_a_step(executor: Executor) -> None:
    result = executor.execute(make_plan(33, 3, 1.0))
    assert result.step_id == 1
    assert all(0 <= token < 5000 for token in result.token_ids)
    assert result.token_ids == executor.execute(make_plan(33, 3, 1.0)).token_ids


@pytest.mark.parametrize(
    ("name", "token_bytes"), [("float16", 16 * 2), ("bfloat16", 16 * 2), ("int8", 16 + 4), ("float32", 16 * 4)]
)
def test_kv_cache_is_stored_as_configured(checkpoint: Path, name: KVCacheDtype, token_bytes: int) -> None:
    """`token_bytes` of a key or a value of one head, with int8's scale."""
    runtime = RuntimeConfig(threads=1, kv_cache_dtype=name, memory_budget=2**26, max_model_len=512)
    executor = load_executor(checkpoint, runtime, SchedulerConfig(max_num_seqs=2, block_size=32), lambda *told: None)
    layers = executor._runner._kv
    tensors = [tensor for kv in layers for tensor in (kv.key_NHDB, kv.value_NHBD, kv.scales_NH2B) if tensor is not None]
    assert executor.info.num_blocks == layers[0].key_NHDB.shape[0] == 32
    assert executor.info.kv_bytes == sum(tensor.nbytes for tensor in tensors) == 32 * 32 * 2 * 2 * 2 * token_bytes
    assert f"KV cache in {name}" in executor.info.description
    assert executor.execute(make_plan(33, 3, 1.0)).step_id == 1


@pytest.mark.parametrize(
    ("tokens", "rows", "temperature", "kernels"), [(1024, 1, 0.0, "auto"), (64, 64, 100.0, "reference")]
)
def test_activations_are_as_planned(
    checkpoint: Path, tokens: int, rows: int, temperature: float, kernels: Literal["auto", "reference"]
) -> None:
    """A step takes what memory was planned for within 10 %, and keeps nothing."""
    plan = make_plan(tokens, rows, temperature)
    runtime, scheduler = RuntimeConfig(device="cpu", kernels=kernels), SchedulerConfig(max_num_seqs=2, block_size=32)
    executor = load_executor(checkpoint, runtime, scheduler, lambda stage, fraction: None)
    peak, living = measured_bytes(lambda: executor.execute(plan))
    architecture = replace(MODEL, vocab_size=5000, intermediate_size=512)
    assert peak == pytest.approx(activation_bytes(architecture, tokens, rows), rel=0.1)
    assert living == 0


def test_scores_of_plain_torch_are_planned(checkpoint: Path) -> None:
    """They are there for all keys of a sequence at once, and most of what a step takes; its feed-forward blocks come
    later, but are planned beside."""
    plan, scheduler = make_plan(1024, 1, 0.0), SchedulerConfig(max_num_seqs=2, block_size=32)
    scheduler = replace(scheduler, max_num_batched_tokens=1024)
    runtime = RuntimeConfig(kernels="reference", max_model_len=1024)
    executor = load_executor(checkpoint, runtime, scheduler, lambda stage, fraction: None)
    peak, _ = measured_bytes(lambda: executor.execute(plan))
    planned = executor.info.step_bytes
    assert planned > 3 * activation_bytes(replace(MODEL, intermediate_size=512), 1024, 0)
    assert 0.8 * planned < peak <= planned


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_the_memory_of_its_share(checkpoint: Path, rank: int) -> None:
    """In a step within 10 %; and no more than half of the budget, less what it has of weights and the cache."""
    architecture, runtime = replace(MODEL, vocab_size=5000, intermediate_size=512), RuntimeConfig(memory_budget=2**25)
    plan, scheduler = make_plan(1024, 1, 0.0), SchedulerConfig(max_num_seqs=2, block_size=32)
    whole = load_executor(checkpoint, runtime, scheduler, lambda stage, fraction: None).info

    def one(collectives: SharedMemoryCollectives) -> int:
        ranks = Ranks(mesh=tensor_mesh(collectives), ranks_here=2, agree=lambda facts: facts)
        runner, info = load_runner(checkpoint, runtime, scheduler, lambda stage, fraction: None, ranks)
        assert info.weight_bytes < 0.6 * whole.weight_bytes
        assert info.kv_bytes // info.num_blocks * 2 == whole.kv_bytes // whole.num_blocks
        work = runner.run if collectives.rank == 0 else runner.follow
        if collectives.rank == rank:
            return measured_bytes(lambda: work(plan))[0]
        work(plan)
        return 0

    own = split(architecture, 2)[rank].narrowed(architecture)
    assert on_shared_memory(2, one)[rank] == pytest.approx(activation_bytes(own, 1024, 1), rel=0.1)


def test_rank_0_takes_the_memory_of_all_logits(checkpoint: Path) -> None:
    """Its part and that of the other rank, and both put together."""
    plan, scheduler = make_plan(64, 64, 0.0), SchedulerConfig(max_num_seqs=2, block_size=32)

    def one(collectives: SharedMemoryCollectives) -> int:
        ranks = Ranks(mesh=tensor_mesh(collectives), ranks_here=2, agree=lambda facts: facts)
        runner, _ = load_runner(checkpoint, RuntimeConfig(), scheduler, lambda stage, fraction: None, ranks)
        if collectives.rank == 0:
            return measured_bytes(lambda: runner.run(plan))[0]
        runner.follow(plan)
        return 0

    architecture = replace(MODEL, vocab_size=5000, intermediate_size=512)
    planned = activation_bytes(architecture, 64, 64, sampler_threads=0, gathered=True)
    assert on_shared_memory(2, one)[0] == pytest.approx(planned, rel=0.1)
    assert planned > 1.9 * activation_bytes(architecture, 64, 64, sampler_threads=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_takes_no_more_memory_than_is_planned(checkpoint: Path, rank: int) -> None:
    """Of a step it computes a part at a time."""
    runtime, scheduler = RuntimeConfig(memory_budget=2**26), SchedulerConfig(max_num_seqs=2, block_size=32)
    plan = make_plan(1024, 1, 0.0)
    whole = load_executor(checkpoint, runtime, scheduler, lambda stage, fraction: None).info

    def one(mesh: Mesh) -> tuple[int, int]:
        ranks = Ranks(mesh=mesh, ranks_here=2, agree=lambda facts: facts)
        runner, info = load_runner(checkpoint, runtime, scheduler, lambda stage, fraction: None, ranks)
        assert info.weight_bytes < whole.weight_bytes
        assert info.kv_bytes // info.num_blocks * 2 == whole.kv_bytes // whole.num_blocks
        work = runner.run if mesh.layout.rank == 0 else runner.follow
        planned = activation_bytes(runner._model.own, 1024, 1)  # type: ignore[attr-defined]
        if mesh.layout.rank == rank:
            return measured_bytes(lambda: work(plan))[0], planned
        work(plan)
        return 0, planned

    stages = mesh_on_shared_memory(Layout(pipeline_size=2), one)
    measured, planned = stages[rank]
    assert 0.05 * planned < measured <= planned


def test_progress_tells_stages(checkpoint: Path) -> None:
    told: list[tuple[str, float]] = []
    load_executor(
        checkpoint,
        RuntimeConfig(num_kv_blocks=4, max_model_len=64),
        SchedulerConfig(),
        lambda stage, fraction: told.append((stage, fraction)),
    )
    assert told[0] == ("preparing kernels", 0.0)
    loading = [fraction for stage, fraction in told if stage == "loading weights"]
    assert loading == sorted(loading)
    assert loading[-1] == 1.0


def test_tables_of_positions_are_no_longer_than_what_is_served(tmp_path: Path) -> None:
    """A checkpoint may claim so many positions that a table of them all fits no machine."""
    make_checkpoint(tmp_path, "llama", {"num_hidden_layers": 1, "max_position_embeddings": 10**12})
    served = RuntimeConfig(num_kv_blocks=4, max_model_len=64)
    executor = load_executor(tmp_path, served, SchedulerConfig(), lambda stage, fraction: None)
    assert executor.info.max_model_len == 64
    with pytest.raises(PlanError, match=r"max_model_len 1000000000000 .*raise memory_budget, or set max_model_len"):
        load_executor(tmp_path, RuntimeConfig(), SchedulerConfig(), lambda stage, fraction: None)


def test_rotation_table_is_in_the_budget(checkpoint: Path) -> None:
    def num_blocks(budget: int) -> int:
        runtime = RuntimeConfig(memory_budget=budget, max_model_len=1024)
        return load_executor(checkpoint, runtime, SchedulerConfig(max_num_seqs=2), lambda *told: None).info.num_blocks

    info = load_executor(checkpoint, RuntimeConfig(), SchedulerConfig(max_num_seqs=2), lambda *told: None).info
    steady = info.weight_bytes + info.step_bytes + 4 * 16 * 1024
    block = 2 * 2 * 2 * 16 * 16 * 4
    assert num_blocks(steady + 70 * block) == 70
    assert num_blocks(steady + 70 * block - 1) == 69


def test_threads_are_set(checkpoint: Path) -> None:
    before = torch.get_num_threads()
    try:
        runtime = RuntimeConfig(num_kv_blocks=4, max_model_len=64, threads=1)
        load_executor(checkpoint, runtime, SchedulerConfig(), lambda stage, fraction: None)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
