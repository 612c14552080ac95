"""What is pooled is transformers' `last_hidden_state`, and the same bit for bit however the prompt is computed."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.ops import load_ops
from model_runtime.pooling import CHUNK
from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.plan import ints
from scheduler.request import FinishReason, Pooling, Request, SamplingParams
from tests.checkpoints import SPECIAL_TOKENS, VOCAB_SIZE, make_checkpoint
from tests.model_runtime.driver import Session

LENGTHS = (1, 2, 15, 16, 17, 60, CHUNK + 1, 2 * CHUNK + 30)
ROOMY = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256)
CHUNKED = replace(ROOMY, max_num_batched_tokens=16, prefill_share=0.5)


def _prompts() -> list[list[int]]:
    random = Random(5)
    common = [random.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE) for _ in range(max(LENGTHS))]
    return [[*common[: length - 1], random.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE)] for length in LENGTHS]


PROMPTS = _prompts()


def _requests(pooling: Pooling) -> list[Request]:
    return [
        Request(seq_id=index, prompt_ids=ints(prompt), sampling=SamplingParams(max_tokens=1), pooling=pooling)
        for index, prompt in enumerate(PROMPTS)
    ]


def _neighbours() -> list[Request]:
    sampling = SamplingParams(max_tokens=60)
    return [
        Request(seq_id=100 + index, prompt_ids=ints(PROMPTS[index]), sampling=sampling, priority=-1)
        for index in range(4)
    ]


def _alone(model: LoadedModel, requests: Iterable[Request], config: SchedulerConfig) -> dict[int, bytes]:
    """Each in an engine of its own."""
    return {request.seq_id: Session(model, config, 64).run([request])[request.seq_id].pooled for request in requests}


def load(folder: Path) -> LoadedModel:
    device = torch.device("cpu")
    return load_model(folder, load_ops(device, "auto"), device, lambda fraction: None)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    """A model, and transformers' of the same checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_checkpoint(folder, request.param, {})
    return load(folder), reference


def _expected(reference: Any, prompt: list[int], pooling: Pooling) -> NDArray[np.float64]:
    with torch.inference_mode():
        hidden_TC = reference.model(torch.tensor([prompt])).last_hidden_state[0].double()
    return (hidden_TC.sum(dim=0) if pooling == "mean" else hidden_TC[-1]).numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_as_transformers(case: tuple[LoadedModel, Any], pooling: Pooling) -> None:
    model, reference = case
    for config in (ROOMY, CHUNKED):
        outcomes = Session(model, config, 64).run(_requests(pooling))
        for seq_id, prompt in enumerate(PROMPTS):
            expected = _expected(reference, prompt, pooling)
            difference = np.linalg.norm(np.frombuffer(outcomes[seq_id].pooled) - expected)
            assert difference <= 1e-5 * np.linalg.norm(expected), f"{len(prompt)} tokens"
            assert (outcomes[seq_id].token_ids, outcomes[seq_id].finish_reason) == ([], FinishReason.STOP)


@pytest.mark.parametrize("tied", [False, True])
def test_model_that_was_saved_without_its_head(tmp_path: Path, tied: bool) -> None:
    """As embedding models often are: keys without a prefix, and no output matrix unless it is the embedding."""
    reference: Any = make_checkpoint(tmp_path / "whole", "qwen3", {"tie_word_embeddings": tied})
    reference.model.save_pretrained(tmp_path / "base")
    assert not any(key.startswith(("model.", "lm_head")) for key in load_file(tmp_path / "base" / "model.safetensors"))
    whole, base = load(tmp_path / "whole"), load(tmp_path / "base")
    assert (whole.config.has_output, base.config.has_output) == (True, tied)
    found = _alone(base, _requests("last"), ROOMY)
    assert found == _alone(whole, _requests("last"), ROOMY)
    hidden_RC = torch.ones(1, base.config.hidden_size)
    if tied:
        assert torch.equal(base.decoder.logits(hidden_RC), whole.decoder.logits(hidden_RC))
    else:
        with pytest.raises(AssertionError, match="without an output matrix"):
            base.decoder.logits(hidden_RC)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_same_bits_alone_in_chunks_among_others_and_after_preemption(
    case: tuple[LoadedModel, Any], pooling: Pooling
) -> None:
    model, _ = case
    requests = _requests(pooling)
    alone = _alone(model, requests, ROOMY)
    assert len(set(alone.values())) == len(requests)
    assert _alone(model, requests, CHUNKED) == alone
    speculative = SpeculativeConfig(method="self", num_speculative_tokens=3, num_draft_layers=1)
    for config in (ROOMY, CHUNKED, replace(CHUNKED, prefill_share=0.125, speculative_config=speculative)):
        session = Session(model, config, 12)
        outcomes = session.run([*_neighbours(), *requests])
        assert {seq_id: outcomes[seq_id].pooled for seq_id in alone} == alone
        again = session.run(requests)
        assert {seq_id: outcome.pooled for seq_id, outcome in again.items()} == alone, "with a warm cache"
        assert session.most_sequences > 4
    assert session.scheduler.stats().preemptions > 0
    assert (session.scheduler.stats().prefix_hits > 0) == (pooling == "last")
