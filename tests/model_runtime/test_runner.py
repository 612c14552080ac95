"""The runner with a stub model whose logits are known exactly: which rows, which order, what failures do."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.caches import Caches
from model_runtime.kv_store import KVLayer
from model_runtime.ops import load_ops
from model_runtime.runner import SCORE_CHUNK, Runner
from scheduler.plan import FAILED_TOKEN, LOGPROB_FLOOR, NO_LOGPROBS, SampleRows, ScoreRows, StepPlan, ints
from tests.model_runtime.sampling_case import Row, to_plan

CPU = torch.device("cpu")
OPS = load_ops(CPU, "auto")
VOCAB = 32
NAN_TOKEN = 13


class Successor:
    """Logit 9 for the token after the one at the row, 0 for others; NaN everywhere after NAN_TOKEN."""

    def __init__(self) -> None:
        self.logit_rows: list[int] = []
        self.batches: list[Batch] = []
        self.kv: Caches = []

    def forward(self, batch: Batch, kv: Caches) -> Tensor:
        self.batches.append(batch)
        self.kv = kv
        return batch.token_ids_T[:, None].float()

    def logits(self, hidden_RC: Tensor) -> Tensor:
        self.logit_rows.append(len(hidden_RC))
        logits = 9.0 * torch.nn.functional.one_hot((hidden_RC[:, 0].long() + 1) % VOCAB, VOCAB).float()
        logits[hidden_RC[:, 0] == NAN_TOKEN] = math.nan
        return logits


def greedy(rows: list[int], top_logprobs: int = NO_LOGPROBS) -> SampleRows:
    return replace(to_plan([Row(top_logprobs=top_logprobs)] * len(rows)), rows=ints(rows))


def make_plan(token_ids: list[int], sample: SampleRows, score: ScoreRows) -> StepPlan:
    """Two sequences: all but the last two tokens at positions 0.., then two at positions 4 and 5."""
    first = len(token_ids) - 2
    num_blocks = -(-first // 4) + 2
    return StepPlan(
        step_id=41,
        token_ids=ints(token_ids),
        query_lens=ints([first, 2]),
        kv_lens=ints([first, 6]),
        block_tables=ints(list(range(num_blocks))),
        sample=sample,
        score=score,
    )


@pytest.fixture
def model() -> Successor:
    return Successor()


@pytest.fixture
def runner(model: Successor) -> Runner:
    return Runner(model, [], 4, OPS)


def test_samples_the_rows_of_the_plan_in_order(runner: Runner, model: Successor) -> None:
    result = runner.run(make_plan([3, 4, 5, 20, 21], greedy([4, 2]), ScoreRows()))
    assert result.step_id == 41
    assert list(result.token_ids) == [22, 6]
    assert list(result.sampled.chosen) == [0.0, 0.0]
    assert list(result.scored.chosen) == []
    assert list(result.scored.top_offsets) == [0]
    assert model.logit_rows == [2], "logits are computed for the sampled rows only"
    assert model.batches[0].positions_T.tolist() == [0, 1, 2, 4, 5]
    assert model.batches[0].slots_T.tolist() == [0, 1, 2, 8, 9]


def test_step_without_samples_computes_no_logits(runner: Runner, model: Successor) -> None:
    result = runner.run(make_plan([3, 4, 5, 20, 21], SampleRows(), ScoreRows()))
    assert list(result.token_ids) == list(result.sampled.chosen) == []
    assert list(result.sampled.top_offsets) == [0]
    assert model.logit_rows == []


def test_a_row_of_nan_fails_alone(runner: Runner) -> None:
    result = runner.run(make_plan([3, 4, NAN_TOKEN, 20, 21], greedy([2, 4], top_logprobs=1), ScoreRows()))
    assert list(result.token_ids) == [FAILED_TOKEN, 22]
    peak = 9.0 - math.log(math.exp(9.0) + VOCAB - 1)
    assert list(result.sampled.chosen) == pytest.approx([LOGPROB_FLOOR, peak], abs=1e-6)
    assert all(math.isfinite(value) for value in result.sampled.top_values)


def test_scores_in_chunks_as_if_at_once(runner: Runner, model: Successor) -> None:
    count = 2 * SCORE_CHUNK + 5
    token_ids = [index % 7 for index in range(count)] + [20, 21]
    score = ScoreRows(
        rows=ints(list(range(count))),
        targets=ints([token + 1 if index % 3 else 30 for index, token in enumerate(token_ids[:count])]),
        top_logprobs=ints([index % 3 for index in range(count)]),
    )
    result = runner.run(make_plan(token_ids, greedy([count - 1]), score))
    assert model.logit_rows == [1, SCORE_CHUNK, SCORE_CHUNK, 5]
    other = -math.log(math.exp(9.0) + VOCAB - 1)
    expected = [other + (9.0 if index % 3 else 0.0) for index in range(count)]
    assert list(result.scored.chosen) == pytest.approx(expected, abs=1e-5)
    assert len(result.scored.ranks) == len(expected) and min(result.scored.ranks) >= 1
    offsets = result.scored.top_offsets
    assert [end - start for start, end in pairwise(offsets)] == list(score.top_logprobs)
    tops = [list(result.scored.top_ids[start:end]) for start, end in pairwise(offsets)]
    assert all(top[0] == token_ids[index] + 1 for index, top in enumerate(tops) if top)
    assert list(result.token_ids) == [token_ids[count - 1] + 1]


def test_passes_its_memory_to_the_model() -> None:
    model, kv = Successor(), [KVLayer(torch.zeros(3, 1, 2, 4), torch.zeros(3, 1, 4, 2))]
    Runner(model, kv, 4, OPS).run(make_plan([3, 20, 21], greedy([0]), ScoreRows()))
    assert model.kv is kv


def test_contradicting_plan_is_refused(runner: Runner) -> None:
    plan = make_plan([3, 4, 5, 20, 21], greedy([4]), ScoreRows())
    with pytest.raises(AssertionError, match="sum to the number of tokens"):
        runner.run(replace(plan, query_lens=ints([2, 2])))
    with pytest.raises(AssertionError, match="block tables"):
        runner.run(replace(plan, block_tables=ints([0, 1])))


def test_all_logits_are_those_of_every_token(runner: Runner, model: Successor) -> None:
    logits = runner.all_logits(make_plan([3, 4, 5, 20, 21], greedy([4, 2]), ScoreRows()))
    assert logits.argmax(dim=1).tolist() == [4, 5, 6, 21, 22]


def test_a_step_without_tokens_computes_nothing(runner: Runner, model: Successor) -> None:
    plan = StepPlan(
        step_id=7,
        token_ids=ints(),
        query_lens=ints(),
        kv_lens=ints(),
        block_tables=ints(),
        sample=SampleRows(),
        score=ScoreRows(),
        free_blocks=ints([0, 1, 3]),
    )
    result = runner.run(plan)
    runner.follow(plan)
    assert (result.step_id, list(result.token_ids), list(result.sampled.chosen)) == (7, [], [])
    assert model.batches == []
