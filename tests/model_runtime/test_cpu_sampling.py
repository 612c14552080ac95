"""The compiled sampler against the reference, and what only the compiled one could get wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from model_runtime.ops import load_ops
from tests.model_runtime.op_cases import CPU, compiled
from tests.model_runtime.sampling_case import Row, draws, expected_distribution, random_rows, to_plan

REFERENCE = load_ops(CPU, "reference")


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.5, 4.0])
@pytest.mark.parametrize("vocab", [12, 64, 1000, 6007])
def test_the_compiled_sampler_draws_the_tokens_of_the_reference(vocab: int, spread: float) -> None:
    generator = np.random.default_rng(13)
    logits = generator.normal(size=(60, vocab)).astype(np.float32) * spread
    logits[::2] = logits[::2].round(1)  # ties, -0 among them
    rows = to_plan(random_rows(60, vocab, generator), vocab)
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


def test_a_top_p_below_all_float32_keeps_one_token() -> None:
    logits_NV = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 6007)).astype(np.float32))
    for top_k in (0, 5):
        rows = to_plan([Row(temperature=1.0, top_p=1e-50, top_k=top_k, seed=seed) for seed in range(4)])
        assert list(compiled().sample(logits_NV, rows)[0]) == logits_NV.argmax(dim=1).tolist()


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


def test_masks_of_another_vocabulary_are_refused() -> None:
    rows = to_plan([Row(allowed=frozenset({3}))], 32)
    with pytest.raises(AssertionError, match="not those of 33 tokens"):
        compiled().sample(torch.zeros(1, 33), rows)
