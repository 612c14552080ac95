"""Times what a decode step does beside the model: `python -m model_runtime.kernels.bench_sampling`.

A whole `Runner.run` with a model that computes nothing; then sampling against plain torch, for logits that are flat
(standard normal) and peaked (four times that). Numbers from different runs on a shared machine do not compare; ratios
within one do. A command for people.
"""

from functools import partial

import torch
from torch import Tensor

from model_runtime.batch import Batch, make_batch
from model_runtime.caches import Caches
from model_runtime.kernels.bench import best_seconds
from model_runtime.ops import load_ops
from model_runtime.ops.registry import Ops
from model_runtime.runner import Runner
from scheduler.plan import NO_LOGPROBS, SampleRows, ScoreRows, StepPlan, floats, ints, uints

CPU = torch.device("cpu")
VOCAB, HIDDEN = 49152, 576
ROWS = (1, 16, 64)
KINDS = (  # name, temperature, top_k, top_p, log-probabilities
    ("greedy", 0.0, 0, 1.0, NO_LOGPROBS),
    ("greedy, 5 logprobs", 0.0, 0, 1.0, 5),
    ("temperature 1", 1.0, 0, 1.0, NO_LOGPROBS),
    ("top_k 50", 1.0, 50, 1.0, NO_LOGPROBS),
    ("top_p 0.9", 1.0, 0, 0.9, NO_LOGPROBS),
    ("top_p 0.99", 1.0, 0, 0.99, NO_LOGPROBS),
)
CONTEXT, BLOCK_SIZE = 512, 16


def sample_rows(count: int, temperature: float, top_k: int, top_p: float, logprobs: int) -> SampleRows:
    """`count` rows that are sampled alike, each with its own seed."""
    zeros = [0] * count
    return SampleRows(
        rows=ints(list(range(count))),
        temperature=floats([temperature] * count),
        top_k=ints([top_k] * count),
        top_p=floats([top_p] * count),
        min_p=floats([0.0] * count),
        seed=uints(list(range(count))),
        counter=uints(zeros),
        presence_penalty=floats([0.0] * count),
        frequency_penalty=floats([0.0] * count),
        repetition_penalty=floats([1.0] * count),
        history_offsets=ints([0, *zeros]),
        history_output_starts=ints(zeros),
        bias_offsets=ints([0, *zeros]),
        top_logprobs=ints([logprobs] * count),
    )


def bench_sampling(ops: Ops, reference: Ops, rows: int, spread: float) -> None:
    """A line for each kind of sampling."""
    logits_NV = torch.randn(rows, VOCAB) * spread
    for name, temperature, top_k, top_p, logprobs in KINDS:
        plan = sample_rows(rows, temperature, top_k, top_p, logprobs)
        ours = best_seconds(partial(ops.sample, logits_NV, plan))
        theirs = best_seconds(partial(reference.sample, logits_NV, plan))
        shape = "flat" if spread == 1 else "peaked"
        print(f"{rows:3} rows {shape:7}{name:19} {ours * 1e6:9.0f} us {theirs / ours:8.1f} x torch")


class NoModel:
    """Hidden states and logits that are there already."""

    def __init__(self, rows: int) -> None:
        self._hidden, self._logits = torch.randn(rows, HIDDEN), torch.randn(rows, VOCAB)

    def forward(self, batch: Batch, kv: Caches) -> Tensor:
        """The same for every batch."""
        return self._hidden

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """The same for all."""
        return self._logits


def bench_step(ops: Ops, count: int) -> None:
    """A line: one token of each of `count` sequences."""
    blocks = count * CONTEXT // BLOCK_SIZE
    plan = StepPlan(
        step_id=1,
        token_ids=ints([7] * count),
        query_lens=ints([1] * count),
        kv_lens=ints([CONTEXT] * count),
        block_tables=ints(list(range(blocks))),
        sample=sample_rows(count, 0.0, 0, 1.0, NO_LOGPROBS),
        score=ScoreRows(),
    )
    runner = Runner(NoModel(count), [], BLOCK_SIZE, ops)
    batch, step = best_seconds(lambda: make_batch(plan, BLOCK_SIZE)), best_seconds(lambda: runner.run(plan))
    print(f"{count:3} sequences: make_batch {batch * 1e6:5.0f} us, a greedy step without a model {step * 1e6:6.0f} us")


def main() -> None:
    """Print the tables."""
    ops, reference = load_ops(CPU, "auto"), load_ops(CPU, "reference")
    print(f"{torch.get_num_threads()} threads, {VOCAB} tokens")
    for count in ROWS:
        bench_step(ops, count)
    for spread in (1.0, 4.0):
        for rows in ROWS:
            bench_sampling(ops, reference, rows, spread)


if __name__ == "__main__":
    main()
