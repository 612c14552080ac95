"""Models with states: the memory that is planned for them and taken, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from model_runtime.architecture import ModelConfig
from model_runtime.caches import states
from model_runtime.checkpoint import load_model
from model_runtime.config import RuntimeConfig
from model_runtime.executor import Executor, load_executor
from model_runtime.memory.budget import PlanError, size_pool
from model_runtime.memory.steps import activation_bytes, step_bytes
from model_runtime.models.decoder import Decoder
from model_runtime.ops import load_ops
from model_runtime.state_store import refused_states
from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.plan import NO_STATE, SampleRows, ScoreRows, StateRuns, StepPlan, ints
from tests.checkpoints import HYBRID, make_checkpoint
from tests.family_cases import make_random_model
from tests.model_runtime.memory import measured_bytes

SCHEDULER = SchedulerConfig(max_num_seqs=3, max_state_checkpoints=5)
ONE_STATE = 4 * (3 * (2 * 2 * 8 + 4 * 16) + 4 * 8 * 16)
"""Bytes of the inputs of three rows (2 key heads of 8 channels twice, 4 value heads of 16) and of four matrices."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    make_checkpoint(folder, "qwen3_next", HYBRID)
    return folder


def load(checkpoint: Path, runtime: RuntimeConfig, scheduler: SchedulerConfig = SCHEDULER) -> Executor:
    return load_executor(checkpoint, runtime, scheduler, lambda *told: None)


def read_config(checkpoint: Path) -> ModelConfig:
    cpu = torch.device("cpu")
    return load_model(checkpoint, load_ops(cpu, "reference"), cpu, lambda fraction: None).config


def test_states_take_what_is_told(checkpoint: Path) -> None:
    """One of the two layers has states, the other one keys and values."""
    executor = load(checkpoint, RuntimeConfig(num_kv_blocks=16))
    layer = states(executor._runner._kv[0])
    assert executor.info.has_states
    assert executor.info.state_bytes == (3 + 5) * ONE_STATE == layer.conv_NPC.nbytes + layer.delta_NHKV.nbytes
    assert executor.info.kv_bytes == 16 * 16 * 2 * 2 * 16 * 4  # blocks, tokens, key and value, heads, channels, bytes


def test_the_pool_has_what_states_leave(checkpoint: Path) -> None:
    config, runtime, block = read_config(checkpoint), RuntimeConfig(max_model_len=64), 4096

    def num_blocks(budget: int, scheduler: SchedulerConfig = SCHEDULER) -> int:
        sizes = {"weight_bytes": 0, "block_bytes": block, "step": step}
        return size_pool(config, runtime, scheduler, budget=budget, **sizes).num_blocks

    step = step_bytes(config, runtime, SCHEDULER)
    steady = step + (3 + 5) * ONE_STATE
    assert num_blocks(steady + 10 * block) == 10
    assert num_blocks(steady + 10 * block - 1) == 9
    assert num_blocks(steady + 10 * block, replace(SCHEDULER, max_state_checkpoints=6)) == 9
    assert num_blocks(steady + 9 * block, replace(SCHEDULER, enable_prefix_caching=False)) == 12
    ngram = replace(SCHEDULER, speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=2))
    drafting = 3 * 2 * ONE_STATE
    assert num_blocks(steady + drafting + 10 * block, ngram) == 10
    assert num_blocks(steady + drafting + 10 * block - 1, ngram) == 9
    with pytest.raises(PlanError, match=r"8 states 0\.024"):
        num_blocks(steady)


@pytest.mark.parametrize(("family", "seed"), [("qwen3_next", 0), ("qwen3_5_text", 0), ("kimi_linear", 0)])
def test_a_step_takes_what_is_planned(tmp_path: Path, family: str, seed: int) -> None:
    """Within 10 %."""
    make_random_model(tmp_path, family, seed)
    executor = load(tmp_path, RuntimeConfig(num_kv_blocks=16))
    plan = StepPlan(
        step_id=1,
        token_ids=ints([5] * 200),
        query_lens=ints([200]),
        kv_lens=ints([200]),
        block_tables=ints(list(range(13))),
        sample=SampleRows(),
        score=ScoreRows(),
        states=StateRuns(ends=ints([200]), reads=ints([NO_STATE]), writes=ints([0])),
    )
    peak, living = measured_bytes(lambda: executor.execute(plan))
    config = cast(Decoder, executor._runner._model).own
    assert peak == pytest.approx(activation_bytes(config, 200, 0), rel=0.1)
    assert living == 0


def test_what_states_cannot_do_is_refused_by_name(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    for method in (
        SpeculativeConfig(method="self", num_speculative_tokens=4, num_draft_layers=1),
        SpeculativeConfig(method="mtp", num_speculative_tokens=4),
    ):
        with pytest.raises(PlanError, match=f"method {method.method} is not supported for qwen3_next.*use ngram"):
            load(checkpoint, RuntimeConfig(), replace(SCHEDULER, speculative_config=method))
    divided = RuntimeConfig(context_parallel_size=2)
    assert "context_parallel_size above 1 is not supported" in refused_states(config, divided, SCHEDULER, "cpu")
    assert "--device cpu only" in refused_states(config, RuntimeConfig(), SCHEDULER, "cuda")
    assert refused_states(config, RuntimeConfig(tensor_parallel_size=2), SCHEDULER, "cpu") == ""


def test_a_model_with_states_is_no_draft_model(checkpoint: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {"hidden_size": 256, "intermediate_size": 512})
    draft = SpeculativeConfig(method="draft", num_speculative_tokens=2, model=str(checkpoint))
    with pytest.raises(PlanError, match="qwen3_next cannot be a draft model"):
        load(tmp_path, RuntimeConfig(num_kv_blocks=16), replace(SCHEDULER, speculative_config=draft))
