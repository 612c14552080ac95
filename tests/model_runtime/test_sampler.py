"""The samplers against a slow, obvious version of their definition, bit for bit against themselves in other batches,
and against each other."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from model_runtime.ops import load_ops, set_threads
from model_runtime.ops.registry import Ops
from model_runtime.random import philox, uniform
from model_runtime.ranking import ranked
from scheduler.plan import (
    FAILED_TOKEN,
    LOGPROB_FLOOR,
    NO_LOGPROBS,
    RowLogprobs,
    SampleRows,
    ScoreRows,
    floats,
    ints,
    uints,
)
from tests.model_runtime.op_cases import CPU, compiled

REFERENCE = load_ops(CPU, "reference")


@pytest.fixture(params=["reference", "auto"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Each implementation that runs on this machine."""
    return REFERENCE if request.param == "reference" else compiled()


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one row is sampled."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1
    counter: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = NO_LOGPROBS


def starts(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths, dtype=int).tolist()]


def to_plan(rows: list[Row]) -> SampleRows:
    return SampleRows(
        rows=ints(list(range(len(rows)))),
        temperature=floats([row.temperature for row in rows]),
        top_k=ints([row.top_k for row in rows]),
        top_p=floats([row.top_p for row in rows]),
        min_p=floats([row.min_p for row in rows]),
        seed=uints([row.seed for row in rows]),
        counter=uints([row.counter for row in rows]),
        presence_penalty=floats([row.presence for row in rows]),
        frequency_penalty=floats([row.frequency for row in rows]),
        repetition_penalty=floats([row.repetition for row in rows]),
        history_ids=ints([token for row in rows for token in row.prompt + row.output]),
        history_offsets=ints(starts([len(row.prompt + row.output) for row in rows])),
        history_output_starts=ints([len(row.prompt) for row in rows]),
        bias_ids=ints([token for row in rows for token, _ in row.bias]),
        bias_values=floats([value for row in rows for _, value in row.bias]),
        bias_offsets=ints(starts([len(row.bias) for row in rows])),
        top_logprobs=ints([row.top_logprobs for row in rows]),
    )


def expected_distribution(logits: np.ndarray, row: Row) -> np.ndarray:
    """Probabilities of the definition in float64, one token at a time."""
    logits = logits.astype(np.float64).copy()
    for token, value in row.bias:
        logits[token] += value
    for token in set(row.prompt + row.output):
        times = row.output.count(token)
        logits[token] *= 1 / row.repetition if logits[token] > 0 else row.repetition
        logits[token] -= row.frequency * times + row.presence * (times > 0)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if row.temperature == 0:
        return np.eye(len(logits))[order[0]]
    p = np.exp((logits - logits.max()) / row.temperature)
    p /= p.sum()
    kept = order[: row.top_k or len(order)]
    cumulative, nucleus = 0.0, []
    for token in kept:
        nucleus.append(token)
        cumulative += p[token] / p[kept].sum()
        if cumulative >= row.top_p:
            break
    final = [token for token in nucleus if p[token] >= row.min_p * p.max()]
    result = np.zeros_like(p)
    result[final] = p[final] / p[final].sum()
    return result


def draws(ops: Ops, logits: np.ndarray, row: Row, count: int) -> np.ndarray:
    """Frequencies of `count` tokens drawn with the counters 0, 1, 2..."""
    rows = [replace(row, counter=counter) for counter in range(count)]
    logits_RV = torch.from_numpy(logits).float().expand(count, -1)
    token_ids, _ = ops.sample(logits_RV, to_plan(rows))
    return np.bincount(np.asarray(token_ids), minlength=len(logits)) / count


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


# Philox


def test_philox_known_answers() -> None:
    """The published vectors of philox4x32-10 (Random123, kat_vectors)."""

    def run(counter: list[int], key: list[int]) -> list[int]:
        words = [np.array([word], dtype=np.uint64) for word in counter + key]
        return [int(word[0]) for word in philox(tuple(words[:4]), tuple(words[4:]))]

    assert run([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert run([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert run(pi, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_uniform_is_uniform_and_seeds_differ() -> None:
    counters = np.arange(50_000, dtype=np.uint64)
    for seed in (0, 1, 2**64 - 1):
        u = uniform(np.full_like(counters, seed), counters)
        assert 0 <= u.min() < 1e-3
        assert 0.999 < u.max() < 1
        histogram = np.histogram(u, bins=100, range=(0, 1))[0]
        chi_squared = ((histogram - 500) ** 2 / 500).sum()
        assert chi_squared < 160, "99 degrees of freedom: p < 1e-4"
    first, second = (uniform(np.full_like(counters, seed), counters) for seed in (8, 9))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02


def test_seeded_tokens_are_pinned(ops: Ops) -> None:
    """The function of (seed, counter) is part of the interface: a change of it is a change of everybody's samples."""
    logits_RV = torch.zeros(4, 1000)
    rows = [Row(temperature=1.0, seed=seed, counter=counter) for seed, counter in ((0, 0), (0, 1), (1, 0), (2**63, 7))]
    u = uniform(np.array([0, 0, 1, 2**63], dtype=np.uint64), np.array([0, 1, 0, 7], dtype=np.uint64))
    assert u[0] == ((0x6627E8D5 << 32 | 0xE169C58D) >> 12) / 2**52
    assert list(ops.sample(logits_RV, to_plan(rows))[0]) == [int(value * 1000) for value in u]


# Exactness


def test_ranked_equals_the_stable_sort() -> None:
    generator = torch.Generator().manual_seed(3)
    for levels in (2, 30, 10**6):
        values = torch.randint(levels, (9, 700), generator=generator).float()
        full, ids = torch.sort(values, dim=1, descending=True, stable=True)
        for count in (1, 5, 256, 699, 700, 900):
            top, top_ids = ranked(values, count)
            assert torch.equal(top, full[:, :count])
            assert torch.equal(top_ids, ids[:, :count])


def random_rows(count: int, vocab: int, generator: np.random.Generator) -> list[Row]:
    def one(index: int) -> Row:
        history = tuple(generator.integers(0, vocab, size=40).tolist())
        penalised = bool(generator.integers(0, 2))
        return Row(
            temperature=float(generator.choice([0.0, 0.3, 1.0, 1.7])),
            top_k=int(generator.choice([0, 0, 1, 20, 300, 5000])),
            top_p=float(generator.choice([1.0, 0.95, 0.5])),
            min_p=float(generator.choice([0.0, 0.02])),
            seed=int(generator.integers(0, 2**63)),
            counter=index,
            repetition=1.3 if penalised else 1.0,
            presence=0.4 if penalised else 0.0,
            prompt=history[:25] if penalised else (),
            output=history[25:] if penalised else (),
            bias=((3, -math.inf), (9, 2.5)) if generator.integers(0, 2) else (),
            top_logprobs=int(generator.choice([NO_LOGPROBS, 0, 5, 20])),
        )

    return [one(index) for index in range(count)]


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
        alone = [ops.sample(logits_RV[row : row + 1].clone(), to_plan([rows[row]])) for row in range(count)]
        for size in range(1, count + 1):
            set_threads(1 + size % 3)
            order = generator.permutation(count)[:size]
            token_ids, logprobs = ops.sample(logits_RV[torch.from_numpy(order)], to_plan([rows[row] for row in order]))
            for place, row in enumerate(order):
                assert token_ids[place] == alone[row][0][0]
                assert per_row(logprobs, place) == per_row(alone[row][1], 0)
    finally:
        set_threads(threads)


def test_filters_do_not_depend_on_the_number_of_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(5)
    logits_RV = torch.from_numpy(generator.normal(size=(40, 3000)).astype(np.float32).round(2))  # with ties
    rows = to_plan(random_rows(40, 3000, generator))
    results = []
    for candidates in ((256, 4096), (1,), (2, 3, 40), ()):
        monkeypatch.setattr("model_runtime.ops.sampling.CANDIDATES", candidates)
        results.append(list(REFERENCE.sample(logits_RV, rows)[0]))
    assert results.count(results[0]) == 4


# One implementation against the other


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.5, 4.0])
@pytest.mark.parametrize("vocab", [12, 64, 1000, 6007])
def test_the_compiled_sampler_draws_the_tokens_of_the_reference(vocab: int, spread: float) -> None:
    generator = np.random.default_rng(13)
    logits = generator.normal(size=(60, vocab)).astype(np.float32) * spread
    logits[::2] = logits[::2].round(1)  # ties, -0 among them
    rows = to_plan(random_rows(60, vocab, generator))
    (ids, logprobs), (exact_ids, exact) = (
        each.sample(torch.from_numpy(logits), rows) for each in (compiled(), REFERENCE)
    )
    assert list(ids) == list(exact_ids)
    assert list(logprobs.top_ids) == list(exact.top_ids)
    assert list(logprobs.top_offsets) == list(exact.top_offsets)
    assert list(logprobs.chosen) == pytest.approx(list(exact.chosen), rel=2e-6, abs=1e-6)
    assert list(logprobs.top_values) == pytest.approx(list(exact.top_values), rel=2e-6, abs=1e-6)


@pytest.mark.parametrize("options", [{"top_k": 7}, {"top_p": 0.5}, {"top_k": 700, "top_p": 0.25}, {"min_p": 0.4}])
def test_both_samplers_keep_the_same_tokens(options: dict[str, float]) -> None:
    """Probabilities are powers of two, and what is kept is far from rounding; then every kept token is drawn."""
    bits = np.random.default_rng(3).permutation(np.repeat([0, 1, 5, 12], [2, 6, 80, 2000]))
    logits = -bits.astype(np.float32) * math.log(2)
    row = Row(temperature=1.0, top_k=int(options.get("top_k", 0)), top_p=options.get("top_p", 1.0))
    row = replace(row, min_p=options.get("min_p", 0.0))
    kept = np.flatnonzero(expected_distribution(logits, row))
    for each in (compiled(), REFERENCE):
        assert set(np.flatnonzero(draws(each, logits, row, 4000))) == set(kept)


def test_the_compiled_sampler_draws_the_numbers_of_the_reference() -> None:
    """65 536 equally likely tokens show the first 16 bits of a draw."""
    rows = to_plan([Row(temperature=1.0, seed=2**64 - 1 - seed, counter=2**40 + seed) for seed in range(50)])
    logits_NV = torch.zeros(50, 2**16)
    assert list(compiled().sample(logits_NV, rows)[0]) == list(REFERENCE.sample(logits_NV, rows)[0])


def test_the_compiled_sampler_leaves_logits_as_they_are_and_checks_ids() -> None:
    logits_NV = torch.arange(8.0)[None]
    rows = Row(presence=3.0, repetition=1.1, output=(7, 7, 3), bias=((7, -math.inf), (7, -math.inf), (6, 0.3)))
    assert list(compiled().sample(logits_NV, to_plan([rows]))[0]) == [6]
    assert torch.equal(logits_NV, torch.arange(8.0)[None])
    for wrong in (Row(presence=1.0, output=(8,)), Row(presence=1.0, output=(-1,)), Row(bias=((8, 1.0),))):
        with pytest.raises(AssertionError, match=r"outside 0 \.\. 7"):
            compiled().sample(logits_NV, to_plan([wrong]))


# Failures


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


# Log-probabilities


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
    assert list(scored.top_offsets) == [0, 0, 2, 3]
    assert list(scored.top_ids) == [*np.argsort(-logits[1])[:2], logits[2].argmax()]
