"""Every sampler against a slow, obvious version of the definition, and bit for bit against itself in other batches."""

import math

import numpy as np
import pytest
import torch

from model_runtime.ops import set_threads
from model_runtime.ops.registry import Ops
from model_runtime.random import uniform
from scheduler.plan import FAILED_TOKEN, LOGPROB_FLOOR, RowLogprobs, ScoreRows, ints
from tests.model_runtime.op_cases import EXACT
from tests.model_runtime.sampling_case import Row, draws, expected_distribution, random_rows, to_plan

ROWS = {
    "temperature": Row(temperature=0.7),
    "hot": Row(temperature=5.0),
    "top_k": Row(temperature=1.0, top_k=3),
    "top_k 1": Row(temperature=1.0, top_k=1),
    "top_k beyond the vocabulary": Row(temperature=1.0, top_k=1000),
    "top_p": Row(temperature=1.3, top_p=0.6),
    "top_p of next to nothing": Row(temperature=1.0, top_p=1e-9),
    "min_p": Row(temperature=1.0, min_p=0.3),
    "all filters": Row(temperature=2.0, top_k=6, top_p=0.8, min_p=0.2),
    "bias": Row(temperature=1.0, bias=((3, 4.0), (5, -math.inf), (0, -1.0))),
    "mask": Row(temperature=1.0, allowed=frozenset({1, 4, 11})),
    "penalties": Row(
        temperature=1.0, repetition=1.5, frequency=0.4, presence=0.3, prompt=(0, 1, 1, 2), output=(2, 3, 3, 3, 9)
    ),
    "everything": Row(
        temperature=1.5,
        top_k=8,
        top_p=0.9,
        min_p=0.05,
        repetition=1.2,
        frequency=-0.2,
        presence=0.5,
        prompt=(4, 5),
        output=(4, 7, 7),
        bias=((7, 1.0), (1, -math.inf), (1, -3.0)),
        allowed=frozenset({0, 1, 4, 5, 7, 8, 10}),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_frequencies_follow_the_definition(ops: Ops, name: str) -> None:
    logits = np.random.default_rng(7).normal(size=12).astype(np.float32) * 1.5
    expected, drawn = expected_distribution(logits, ROWS[name]), draws(ops, logits, ROWS[name], 8000)
    assert ((drawn > 0) <= (expected > 0)).all(), "a token outside the filters was drawn"
    deviation = np.sqrt(expected * (1 - expected) / 8000)
    assert (np.abs(drawn - expected) <= 4.5 * deviation + 1e-12).all()


def test_composition_renormalises_after_top_k(ops: Ops) -> None:
    """p = .4 .3 .2 .1: top_k 2 leaves .571 .429; top_p .5 then keeps one token, where the raw p would keep two."""
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], dtype=np.float32))
    assert draws(ops, logits, Row(temperature=1.0, top_k=2, top_p=0.5), 500)[1] == 1.0
    assert draws(ops, logits, Row(temperature=1.0, top_p=0.5), 500)[3] > 0.3


def test_ties_go_to_the_lower_id(ops: Ops) -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    assert list(ops.sample(logits_RV, to_plan([Row()]))[0]) == [1]
    flat = np.zeros(1000, dtype=np.float32)
    assert set(np.flatnonzero(draws(ops, flat, Row(temperature=1.0, top_k=3), 300))) == {0, 1, 2}
    assert set(np.flatnonzero(draws(ops, flat, Row(temperature=1.0, top_p=0.0025), 300))) == {0, 1, 2}


def test_penalty_values_exactly(ops: Ops) -> None:
    """Greedy over two tokens turns where the definition says."""
    plain = torch.tensor([[2.0, 1.01]])
    assert list(ops.sample(plain, to_plan([Row(repetition=2.0, prompt=(0,))]))[0]) == [1]
    assert list(ops.sample(plain, to_plan([Row(repetition=1.9, prompt=(0,))]))[0]) == [0]
    negative = torch.tensor([[-1.0, -1.99]])
    assert list(ops.sample(negative, to_plan([Row(repetition=2.0, prompt=(0,))]))[0]) == [1]
    assert list(ops.sample(negative, to_plan([Row(repetition=1.98, prompt=(0,))]))[0]) == [0]
    assert list(ops.sample(plain, to_plan([Row(frequency=0.34, output=(0, 0, 0))]))[0]) == [1]
    assert list(ops.sample(plain, to_plan([Row(frequency=0.34, prompt=(0,), output=(0, 0))]))[0]) == [0]
    assert list(ops.sample(plain, to_plan([Row(presence=1.0, output=(0, 0))]))[0]) == [1]
    assert list(ops.sample(plain, to_plan([Row(presence=0.98, output=(0, 0))]))[0]) == [0]
    assert list(ops.sample(plain, to_plan([Row(presence=1.0, prompt=(0, 0))]))[0]) == [0]


def test_penalties_and_bias_touch_their_own_row_only(ops: Ops) -> None:
    rows = [Row(), Row(presence=9.0, output=(0,)), Row(), Row(bias=((0, -math.inf),)), Row(bias=((2, 9.0),)), Row()]
    assert list(ops.sample(torch.tensor([[3.0, 2.0, 1.0]]).expand(6, -1), to_plan(rows))[0]) == [0, 1, 0, 1, 2, 0]


def test_seeded_tokens_are_pinned(ops: Ops) -> None:
    """The function of (seed, counter) is part of the interface: a change of it is a change of everybody's samples."""
    logits_RV = torch.zeros(4, 1000)
    rows = [Row(temperature=1.0, seed=seed, counter=counter) for seed, counter in ((0, 0), (0, 1), (1, 0), (2**63, 7))]
    u = uniform(np.array([0, 0, 1, 2**63], dtype=np.uint64), np.array([0, 1, 0, 7], dtype=np.uint64))
    assert u[0] == ((0x6627E8D5 << 32 | 0xE169C58D) >> 12) / 2**52
    assert list(ops.sample(logits_RV, to_plan(rows))[0]) == [int(value * 1000) for value in u]


def per_row(logprobs: RowLogprobs, row: int) -> tuple[float, list[int], list[float]]:
    start, end = logprobs.top_offsets[row], logprobs.top_offsets[row + 1]
    return logprobs.chosen[row], list(logprobs.top_ids[start:end]), list(logprobs.top_values[start:end])


@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_row_is_bit_equal_in_any_batch_and_thread_count(ops: Ops, spread: float) -> None:
    vocab, count = 6007, 33  # no multiple of a vector, so that a row's place in memory varies
    generator = np.random.default_rng(11)
    logits_RV = torch.from_numpy(generator.normal(size=(count, vocab)).astype(np.float32) * spread)
    rows = random_rows(count, vocab, generator)
    threads = torch.get_num_threads()
    try:
        set_threads(1)
        alone = [ops.sample(logits_RV[row : row + 1].clone(), to_plan([rows[row]], vocab)) for row in range(count)]
        for size in range(1, count + 1):
            set_threads(1 + size % 3)
            order = generator.permutation(count)[:size]
            token_ids, logprobs = ops.sample(
                logits_RV[torch.from_numpy(order)], to_plan([rows[row] for row in order], vocab)
            )
            for place, row in enumerate(order):
                assert token_ids[place] == alone[row][0][0]
                assert per_row(logprobs, place) == per_row(alone[row][1], 0)
    finally:
        set_threads(threads)


def test_filters_do_not_depend_on_the_number_of_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(5)
    logits_RV = torch.from_numpy(generator.normal(size=(40, 3000)).astype(np.float32).round(2))  # with ties
    rows = to_plan(random_rows(40, 3000, generator), 3000)
    results = []
    for candidates in ((256, 4096), (1,), (2, 3, 40), ()):
        monkeypatch.setattr("model_runtime.ops.sampling.CANDIDATES", candidates)
        results.append(list(EXACT.sample(logits_RV, rows)[0]))
    assert results.count(results[0]) == 4


def test_rows_that_are_not_finite_fail_alone(ops: Ops) -> None:
    good = torch.tensor([0.0, 5.0, 1.0, 2.0])
    bad = [
        [math.nan, 1, 2, 3],
        [math.inf, 0, 0, 0],
        [-math.inf] * 4,
        [math.nan] * 4,
        [math.inf, -math.inf, math.nan, 0],
    ]
    for temperature in (0.0, 1.0):
        for values in bad:
            logits_RV = torch.stack([good, torch.tensor(values), good])
            options = Row(temperature=temperature, top_k=2, top_p=0.9, min_p=0.01, top_logprobs=3)
            token_ids, logprobs = ops.sample(logits_RV, to_plan([options, options, options]))
            alone, alone_logprobs = ops.sample(good[None], to_plan([options]))
            assert list(token_ids) == [alone[0], FAILED_TOKEN, alone[0]]
            assert per_row(logprobs, 0) == per_row(logprobs, 2) == per_row(alone_logprobs, 0)
            assert logprobs.chosen[1] == LOGPROB_FLOOR
            assert all(math.isfinite(value) for value in (*logprobs.chosen, *logprobs.top_values))


def test_row_with_everything_banned_fails_alone(ops: Ops) -> None:
    banned = Row(temperature=1.0, bias=tuple((token, -math.inf) for token in range(4)), top_logprobs=1)
    token_ids, logprobs = ops.sample(torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2), to_plan([banned, Row()]))
    assert list(token_ids) == [FAILED_TOKEN, 3]
    assert list(logprobs.top_ids) == [3]


def test_one_finite_token_is_enough(ops: Ops) -> None:
    logits_RV = torch.full((2, 500), -math.inf)
    logits_RV[:, 77] = -3.0
    rows = [Row(top_logprobs=2), Row(temperature=1.0, top_k=5, top_p=0.5, top_logprobs=2)]
    token_ids, logprobs = ops.sample(logits_RV, to_plan(rows))
    assert list(token_ids) == [77, 77]
    assert list(logprobs.chosen) == [0.0, 0.0]
    assert list(logprobs.top_values) == [0.0, LOGPROB_FLOOR] * 2


def test_extreme_temperatures_stay_defined(ops: Ops) -> None:
    logits = np.array([1000.0, -1000.0, 999.0, 3e38], dtype=np.float32)
    assert draws(ops, logits, Row(temperature=1e-30), 50)[3] == 1.0
    assert draws(ops, logits[:3], Row(temperature=1e-30), 50)[0] == 1.0
    assert abs(draws(ops, logits[:3], Row(temperature=1e9), 3000) - 1 / 3).max() < 0.05


def test_logprobs_are_of_the_raw_logits(ops: Ops) -> None:
    logits = np.random.default_rng(1).normal(size=(3, 50)).astype(np.float32)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    rows = [
        Row(temperature=3.0, top_k=4, bias=((5, 50.0),), top_logprobs=4),
        Row(presence=30.0, output=(int(logits[1].argmax()),), top_logprobs=0),
        Row(),
    ]
    token_ids, logprobs = ops.sample(torch.from_numpy(logits), to_plan(rows))
    assert token_ids[0] == 5
    assert logprobs.chosen[0] == pytest.approx(expected[0, 5], abs=1e-6)
    assert token_ids[1] != logits[1].argmax()
    assert logprobs.chosen[1] == pytest.approx(expected[1, token_ids[1]], abs=1e-6)
    assert logprobs.chosen[2] == 0.0
    assert list(logprobs.top_offsets) == [0, 4, 4, 4]
    best = np.argsort(-expected[0])[:4]
    assert list(logprobs.top_ids) == best.tolist()
    assert list(logprobs.top_values) == pytest.approx(expected[0, best].tolist(), abs=1e-6)


def test_score(ops: Ops) -> None:
    logits = np.random.default_rng(2).normal(size=(3, 50)).astype(np.float32)
    logits[2, 7] = -math.inf
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    rows = ScoreRows(rows=ints([4, 9, 11]), targets=ints([8, 3, 7]), top_logprobs=ints([0, 2, 1]))
    scored = ops.score(torch.from_numpy(logits), rows)
    assert list(scored.chosen) == pytest.approx([expected[0, 8], expected[1, 3], LOGPROB_FLOOR], abs=1e-6)
    assert list(scored.ranks) == [1 + (logits[0] > logits[0, 8]).sum(), 1 + (logits[1] > logits[1, 3]).sum(), 50]
    assert list(scored.top_offsets) == [0, 0, 2, 3]
    assert list(scored.top_ids) == [*np.argsort(-logits[1])[:2], logits[2].argmax()]


def test_ranks_count_from_the_most_likely_and_ties_by_id(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -math.inf, 2.0]] * 5 + [[math.nan, 0.0, 0.0, 0.0, 0.0]])
    rows = ScoreRows(rows=ints(range(6)), targets=ints([1, 2, 4, 0, 3, 1]), top_logprobs=ints([0] * 6))
    assert list(ops.score(logits, rows).ranks) == [1, 2, 3, 4, 5, 0]
