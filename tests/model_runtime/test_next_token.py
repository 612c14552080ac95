"""DeepSeek-V3's layer for multi-token prediction: what it drafts is what the layer in plain torch predicts, and no
output changes.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from model_runtime.checkpoint import LoadedModel, load_model, load_next_token_layer
from model_runtime.config import RuntimeConfig
from model_runtime.draft import next_token_model
from model_runtime.executor import load_executor
from model_runtime.opening import open_checkpoint
from model_runtime.ops import load_ops
from model_runtime.runner import Runner
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.load import EXACT
from model_runtime.weights.table import Parameters
from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.plan import SampleRows, ScoreRows, StepPlan, ints
from scheduler.request import Request
from tests.model_runtime.driver import Outcome, Session
from tests.model_runtime.next_token import LAYERS, PREFIX, agreeing, make, save
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.test_deepseek import prompts_of
from tests.model_runtime.test_runner import greedy
from tests.model_runtime.test_speculation import ALONE, PRESSED, TOGETHER, alone, requests

__all__ = ["alone", "requests"]  # fixtures

MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """Both, and transformers' model of one layer more with the further tensors."""

    folder: Path
    model: LoadedModel
    layer: Parameters
    reference: Any
    extra: dict[str, Tensor]

    def states(self, tokens: list[int]) -> Tensor:
        """[T, C]: the model's final norm's output."""
        found = self.reference.model(torch.tensor([tokens]), output_hidden_states=True)
        return rms_norm(found.hidden_states[LAYERS][0], (64,), self.reference.model.norm.weight, EPS)

    def predict(self, tokens: list[int], states_TC: Tensor) -> tuple[Tensor, Tensor]:
        """([V] log-probabilities of what follows `tokens`, [C] the layer's output): row i has state i and token
        i + 1."""
        model, weights = self.reference.model, self.extra
        embedded = rms_norm(model.embed_tokens(torch.tensor(tokens[1:])), (64,), weights["enorm.weight"], EPS)
        states_TC = rms_norm(states_TC, (64,), weights["hnorm.weight"], EPS)
        x_1TC = linear(torch.cat([embedded, states_TC], dim=1), weights["eh_proj.weight"])[None]
        positions = torch.arange(len(states_TC))[None]
        mask = torch.full((len(states_TC), len(states_TC)), float("-inf")).triu(1)[None, None]
        rotations = model.rotary_emb(x_1TC, positions)
        output_TC = model.layers[LAYERS](
            x_1TC, attention_mask=mask, position_ids=positions, position_embeddings=rotations
        )[0]
        logits_TV = self.reference.lm_head(rms_norm(output_TC, (64,), weights["shared_head.norm.weight"], EPS))
        return logits_TV[-1].log_softmax(-1), output_TC[-1]


def load(folder: Path) -> tuple[LoadedModel, Parameters]:
    ops = load_ops(DEVICE, "auto")
    model = load_model(folder, ops, DEVICE, lambda fraction: None)
    return model, load_next_token_layer(open_checkpoint(folder), ops, DEVICE, EXACT, model.decoder.share)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("mtp")
    reference, extra = make(folder)
    return Case(folder, *load(folder), reference, extra)


@pytest.fixture(scope="module")
def model(case: Case) -> LoadedModel:
    return case.model


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [5, 100])
def test_drafts_are_those_of_the_layer_in_plain_torch(case: Case, chunk: int) -> None:
    """Three drafts: the first from the model's states, the others from the layer's own output in their place."""
    run = PagedRun(case.model.decoder, block_size=4)
    draft = next_token_model(case.model.decoder, case.layer, run.kv)
    runner = Runner(
        case.model.decoder, run.kv, 4, load_ops(DEVICE, "auto"), draft=draft, final_norm=case.model.decoder.final_norm
    )
    (tokens,) = prompts_of((23,))
    states_TC = case.states(tokens[:-1])
    for start in range(0, len(tokens) - 1, 7):
        runner.run(run.plan({0: tokens[start : min(start + 7, len(tokens) - 1)]}))
    run.plan({0: [0] * 4})  # room for drafts
    done = 0
    for _ in range(3):
        while done < len(tokens) - 1:
            end = min(done + chunk, len(tokens) - 1)
            samples = end == len(tokens) - 1
            slots = [run.tables[0][end // 4] * 4 + end % 4] if samples else []
            plan = StepPlan(
                step_id=0,
                token_ids=ints(tokens[done + 1 : end + 1]),
                query_lens=ints([end - done]),
                kv_lens=ints([end]),
                block_tables=ints(run.tables[0][: -(-end // 4)]),
                sample=greedy([end - done - 1], top_logprobs=5) if samples else SampleRows(),
                score=ScoreRows(),
                by_draft_model=True,
                normed_slots=ints(slots),
            )
            result, done = runner.run(plan), end
        expected_V, output_C = case.predict(tokens, states_TC)
        values, ids = expected_V.topk(5)
        assert result.sampled.top_ids.tolist() == ids.tolist()
        assert result.sampled.top_values.tolist() == pytest.approx(values.tolist(), abs=1e-4)
        tokens, states_TC = [*tokens, int(ids[0])], torch.cat([states_TC, output_C[None]])
        assert result.token_ids.tolist() == tokens[-1:]


@pytest.mark.parametrize(
    ("config", "num_blocks"), [(ALONE, 16), (TOGETHER, 33 * 30), (PRESSED, 130)], ids=["alone", "together", "pressed"]
)
def test_outputs_are_the_same(
    case: Case, requests: list[Request], alone: dict[int, Outcome], config: SchedulerConfig, num_blocks: int
) -> None:
    """Of a layer whose weights are random, and so hardly ever right."""
    session = Session(case.model, replace(config, speculative_config=MTP), num_blocks, next_token=case.layer)
    assert session.run(requests) == alone
    stats = session.scheduler.stats()
    assert stats.speculation.draft_tokens > stats.speculation.accepted_tokens
    assert config is not PRESSED or stats.preemptions > 5
    assert session.run(requests) == alone


@pytest.mark.parametrize("config", [ALONE, TOGETHER, replace(TOGETHER, max_num_batched_tokens=40)])
def test_layer_that_predicts_as_the_model_does_is_always_right(
    case: Case, tmp_path: Path, requests: list[Request], config: SchedulerConfig
) -> None:
    """Greedy or sampled: blocks that add nothing, and a layer that passes on the token's embedding. Any other draft
    would show that a row has another token than the one that follows."""
    tensors = load_file(case.folder / "model.safetensors")
    (tmp_path / "config.json").write_text((case.folder / "config.json").read_text())
    save(tmp_path, agreeing(tensors, 0.0))
    model, parameters = load(tmp_path)
    unending = [request for request in requests if request.seq_id % 4 in (0, 3)]
    unending.append(replace(requests[0], seq_id=1000, prompt_ids=ints([7])))
    plain = Session(model, config, 33 * 30).run(unending)
    session = Session(model, replace(config, speculative_config=MTP), 33 * 30, next_token=parameters)
    assert session.run(unending) == plain
    speculation = session.scheduler.stats().speculation
    assert speculation.accepted_tokens == speculation.draft_tokens > 100
    assert session.run(unending) == plain, "with prefix hits"


def test_what_it_takes(case: Case) -> None:
    """A layer, its keys and values, and a state a token."""
    runtime = RuntimeConfig(prepare_weights=False, num_kv_blocks=20, max_model_len=256, threads=1)
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16)
    plain = load_executor(case.folder, runtime, scheduler, lambda stage, done: None).info
    drafting = load_executor(
        case.folder, runtime, replace(scheduler, speculative_config=MTP), lambda stage, done: None
    ).info
    assert drafting.weight_bytes == plain.weight_bytes + case.layer.num_bytes
    keys = 16 * (24 + 8) * 4
    assert drafting.kv_bytes == plain.kv_bytes + 20 * (keys + 16 * 64 * 4)
    assert 0.1 < drafting.draft_cost < 0.6


@pytest.mark.parametrize(
    ("changes", "num_extra", "message"),
    [
        ({}, 0, "mtp needs layers for multi-token prediction, and there are none"),
        ({"": None}, 1, "mtp needs layers for multi-token prediction, and there are none"),
        ({"eh_proj.weight": None}, 1, r"missing are model\.layers\.3\.eh_proj\.weight"),
        ({"surprise.weight": torch.ones(1)}, 1, r"unused are model\.layers\.3\.surprise\.weight"),
        ({"eh_proj.weight": torch.ones(64, 64)}, 1, r"eh_proj\.weight has shape \[64, 64\]"),
    ],
)
def test_checkpoint_without_such_a_layer(
    case: Case, tmp_path: Path, changes: dict[str, Tensor | None], num_extra: int, message: str
) -> None:
    tensors = load_file(case.folder / "model.safetensors")
    for key, tensor in changes.items():
        if tensor is not None:
            tensors[PREFIX + key] = tensor
        else:
            tensors = {name: value for name, value in tensors.items() if not name.startswith(PREFIX + key)}
    (tmp_path / "config.json").write_text((case.folder / "config.json").read_text())
    save(tmp_path, tensors, num_extra)
    with pytest.raises(CheckpointError, match=message):
        load_next_token_layer(
            open_checkpoint(tmp_path), load_ops(DEVICE, "auto"), DEVICE, EXACT, case.model.decoder.share
        )
