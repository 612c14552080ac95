"""Sampled with drafts, outputs have the distribution that they have without: a chi-square test on a tiny vocabulary.

The model is a Markov chain over four tokens whose probabilities are known, so those of every output are, too.
"""

from collections import Counter
from itertools import product
from math import exp

import pytest
import torch
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.caches import Caches
from model_runtime.ops import load_ops
from model_runtime.runner import Runner
from scheduler.config import SchedulerConfig
from scheduler.plan import ints
from scheduler.request import Request, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.speculation import Proposal

VOCAB, LENGTH, COUNT = 4, 3, 1000
LOGITS = [[0.0, 1.0, -0.5, 0.3], [0.7, 0.0, 0.2, -1.0], [-0.4, 0.1, 0.9, 0.5], [0.2, 0.6, -0.8, 0.0]]
CRITICAL = 30.58
"""Chi-square with 15 degrees of freedom exceeds it with probability 0.01."""


class Chain:
    """The next token depends on the last one alone."""

    def forward(self, batch: Batch, kv: Caches) -> Tensor:
        return batch.token_ids_T[:, None]

    def logits(self, hidden_RC: Tensor) -> Tensor:
        return torch.tensor(LOGITS)[hidden_RC[:, 0].long()]


class Stubborn:
    """Drafts the same two tokens after every text."""

    def propose(self, seq: Sequence) -> Proposal:
        return Proposal(ints([1, 2]), 1.0)

    def finish(self, seq: Sequence) -> None:
        pass


def _outputs(seed: int, drafter: Stubborn | None) -> tuple[list[tuple[int, ...]], int]:
    """(Outputs of sequences with random streams of their own, drafts that held.)"""
    config = SchedulerConfig(max_num_seqs=16, max_queued_requests=COUNT, enable_prefix_caching=False)
    scheduler = Scheduler(config, num_blocks=64, max_model_len=16, drafter=drafter)
    runner = Runner(Chain(), [], config.block_size, load_ops(torch.device("cpu"), "reference"))
    for seq_id in range(COUNT):
        sampling = SamplingParams(max_tokens=LENGTH, seed=seed * COUNT + seq_id)
        scheduler.add(Request(seq_id=seq_id, prompt_ids=ints([0]), sampling=sampling), 0.0)
    outputs: list[tuple[int, ...]] = [()] * COUNT
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.commit(runner.run(plan), 0.0)
        for event in scheduler.take_events():
            outputs[event.seq_id] += event.token_ids
    return outputs, scheduler.stats().speculation.accepted_tokens


def _probability(first: int, *following: int) -> float:
    """Of tokens behind `first`."""
    if not following:
        return 1.0
    share = exp(LOGITS[first][following[0]]) / sum(map(exp, LOGITS[first]))
    return share * _probability(*following)


@pytest.mark.parametrize("seed", range(5))
def test_distribution(seed: int) -> None:
    """Of the last two tokens of three, both of which may have been drafts."""
    outputs, accepted = _outputs(seed, Stubborn())
    assert accepted > COUNT / 4
    counts = Counter(output[1:] for output in outputs)
    chi_square = 0.0
    for pair in product(range(VOCAB), repeat=2):
        expected = COUNT * sum(_probability(0, first, *pair) for first in range(VOCAB))
        assert expected > 5
        chi_square += (counts[pair] - expected) ** 2 / expected
    assert chi_square < CRITICAL


def test_same_seed_same_outputs_with_and_without() -> None:
    with_drafts, _ = _outputs(1, Stubborn())
    assert with_drafts == _outputs(1, None)[0]
