"""Rows to sample, the plan that says so, and their distribution by a slow, obvious version of the definition."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from model_runtime.ops.registry import Ops
from scheduler.plan import NO_LOGPROBS, SampleRows, floats, ints, uints


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
    allowed: frozenset[int] | None = None
    """Of the mask; None for none."""
    top_logprobs: int = NO_LOGPROBS


def starts(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths, dtype=int).tolist()]


def mask_words(allowed: frozenset[int], vocab: int) -> list[int]:
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[sorted(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32).tolist()


def to_plan(rows: list[Row], vocab: int = 0) -> SampleRows:
    """`vocab` is needed where a row has a mask."""
    masked = [(index, row.allowed) for index, row in enumerate(rows) if row.allowed is not None]
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
        mask_rows=ints([index for index, _ in masked]),
        masks=ints([word for _, allowed in masked for word in mask_words(allowed, vocab)]),
        top_logprobs=ints([row.top_logprobs for row in rows]),
    )


def expected_distribution(logits: np.ndarray, row: Row) -> np.ndarray:
    """Probabilities of the definition in float64, one token at a time."""
    logits = logits.astype(np.float64).copy()
    if row.allowed is not None:
        logits[[token for token in range(len(logits)) if token not in row.allowed]] = -math.inf
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
    token_ids, _ = ops.sample(logits_RV, to_plan(rows, len(logits)))
    return np.bincount(np.asarray(token_ids), minlength=len(logits)) / count


def _some_tokens(vocab: int, generator: np.random.Generator) -> frozenset[int]:
    count = int(generator.choice([1, 5, vocab // 2, vocab]))
    return frozenset(generator.choice(vocab, size=count, replace=False).tolist())


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
            allowed=_some_tokens(vocab, np.random.default_rng(index)) if index % 2 else None,
            top_logprobs=int(generator.choice([NO_LOGPROBS, 0, 5, 20])),
        )

    return [one(index) for index in range(count)]
