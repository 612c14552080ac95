"""Drafts of a draft model, or of the model's first layers: outputs stay the same; an equal model is always right."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model_runtime.checkpoint import LoadedModel
from model_runtime.config import RuntimeConfig, RuntimeInfo
from model_runtime.executor import load_executor
from model_runtime.memory.budget import PlanError
from model_runtime.weights.errors import CheckpointError
from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.request import Request
from tests.checkpoints import make_checkpoint
from tests.model_runtime.driver import Outcome, Session
from tests.model_runtime.test_invariance import load
from tests.model_runtime.test_speculation import ALONE, PRESSED, TOGETHER, alone, requests

__all__ = ["alone", "requests"]  # fixtures

DRAFT = SpeculativeConfig(method="draft", num_speculative_tokens=4, model="somewhere")
SELF = SpeculativeConfig(method="self", num_speculative_tokens=4, num_draft_layers=2)
BLOCKS = 33 * 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, "llama", {})
    return load(folder)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Another shape, the same vocabulary, weights of its own."""
    folder = tmp_path_factory.mktemp("stranger")
    make_checkpoint(folder, "llama", {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48})
    return load(folder)


def _with(config: SchedulerConfig, speculative: SpeculativeConfig) -> SchedulerConfig:
    return replace(config, speculative_config=speculative)


@pytest.mark.parametrize(("config", "num_blocks"), [(ALONE, 16), (TOGETHER, BLOCKS)], ids=["alone", "together"])
def test_the_same_model_is_always_right(
    model: LoadedModel, requests: list[Request], alone: dict[int, Outcome], config: SchedulerConfig, num_blocks: int
) -> None:
    """Greedy or sampled, since a draft is sampled with the random number of its token: any other draft would show
    that the draft model saw another text. (Drafts behind the end of an output are none that held.)"""
    unending = [request for request in requests if request.seq_id % 4 in (0, 3)]
    session = Session(model, _with(config, DRAFT), num_blocks, draft=model)
    assert session.run(unending) == {request.seq_id: alone[request.seq_id] for request in unending}
    speculation = session.scheduler.stats().speculation
    assert speculation.accepted_tokens == speculation.draft_tokens > 100


def test_long_texts_are_caught_up_with_in_chunks(
    model: LoadedModel, requests: list[Request], alone: dict[int, Outcome]
) -> None:
    config = replace(TOGETHER, max_num_seqs=8, max_num_batched_tokens=12)
    session = Session(model, _with(config, DRAFT), BLOCKS, draft=model)
    assert session.run(requests) == alone
    speculation = session.scheduler.stats().speculation
    assert speculation.accepted_tokens > 50
    assert session.run(requests) == alone  # what the prefix cache has, the draft model computes again


@pytest.mark.parametrize("kv_type", [torch.float32, torch.int8])
def test_first_layers(model: LoadedModel, requests: list[Request], kv_type: torch.dtype) -> None:
    plain = Session(model, TOGETHER, BLOCKS, kv_type).run(requests)
    session = Session(model, _with(TOGETHER, SELF), BLOCKS, kv_type)
    assert session.run(requests) == plain
    speculation = session.scheduler.stats().speculation
    assert 0 < speculation.accepted_tokens < speculation.draft_tokens


def test_a_stranger(
    model: LoadedModel, stranger: LoadedModel, requests: list[Request], alone: dict[int, Outcome]
) -> None:
    session = Session(model, _with(TOGETHER, DRAFT), BLOCKS, draft=stranger)
    assert session.run(requests) == alone
    speculation = session.scheduler.stats().speculation
    assert speculation.accepted_tokens < speculation.draft_tokens / 2


@pytest.mark.parametrize("speculative", [DRAFT, SELF], ids=["draft", "self"])
def test_preemption(
    model: LoadedModel, requests: list[Request], alone: dict[int, Outcome], speculative: SpeculativeConfig
) -> None:
    draft = model if speculative is DRAFT else None
    session = Session(model, _with(PRESSED, speculative), 130, draft=draft)
    assert session.run(requests) == alone
    assert session.scheduler.stats().preemptions > 5
    assert session.scheduler.stats().speculation.accepted_tokens > 20


def _load(folder: Path, speculative: SpeculativeConfig) -> RuntimeInfo:
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, speculative_config=speculative)
    runtime = RuntimeConfig(prepare_weights=False, num_kv_blocks=20, max_model_len=256, threads=1)
    return load_executor(folder, runtime, scheduler, lambda stage, done: None).info


def test_loading(tmp_path: Path) -> None:
    """Weights and cache of a draft model are planned with the model's; its first layers take nothing."""
    for name, layers in (("model", 3), ("small", 1)):
        make_checkpoint(tmp_path / name, "llama", {"num_hidden_layers": layers})
    plain = _load(tmp_path / "model", replace(DRAFT, method="ngram", model=""))
    own = _load(tmp_path / "model", replace(DRAFT, model=str(tmp_path / "small")))
    part = _load(tmp_path / "model", SELF)
    assert (plain.draft_cost, part.weight_bytes, part.kv_bytes) == (0.0, plain.weight_bytes, plain.kv_bytes)
    assert 0.66 < part.draft_cost < 0.8
    assert own.kv_bytes == plain.kv_bytes * 4 // 3
    assert own.weight_bytes == plain.weight_bytes * (1 + own.draft_cost)
    assert 0.4 < own.draft_cost < 0.6


@pytest.mark.parametrize(
    ("changes", "speculative", "message"),
    [
        ({"vocab_size": 300}, DRAFT, "the draft model has a vocabulary of 300 tokens, and 259 suit the model"),
        ({"max_position_embeddings": 100}, DRAFT, "the draft model has 100 positions, and 256 suit the model"),
        ({"num_hidden_layers": 9}, DRAFT, "bytes of weights"),
        ({}, replace(SELF, num_draft_layers=3), "num_draft_layers 3 must be less than the 3 layers of the model"),
        ({}, replace(DRAFT, model="/nowhere"), "/nowhere"),
    ],
)
def test_a_draft_model_that_does_not_suit_is_refused(
    tmp_path: Path, changes: dict[str, object], speculative: SpeculativeConfig, message: str
) -> None:
    make_checkpoint(tmp_path / "model", "llama", {})
    make_checkpoint(tmp_path / "draft", "llama", changes)
    if speculative is DRAFT:
        speculative = replace(DRAFT, model=str(tmp_path / "draft"))
    with pytest.raises((PlanError, CheckpointError), match=message):
        _load(tmp_path / "model", speculative)
