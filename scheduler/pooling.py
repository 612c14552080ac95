"""Sequences whose hidden states are pooled: the rows of a step that count, and what they come to. Pure functions used
by `plan_builder.py` and `Scheduler`, engine process.

A mean needs the sum of all rows of the prompt, over as many steps as it takes. The runtime keeps nothing about
requests, so what it has so far comes back with each result and goes out with the next plan, in float64: C numbers for a
sequence that has many more of keys and values. It adds row by row, so that the sum does not depend on how the prompt is
cut.
"""

from array import array
from itertools import pairwise

from scheduler.plan import PoolRows
from scheduler.sequence import Sequence


def pool_rows(seqs: list[Sequence], query_lens: list[int], ends: list[int]) -> tuple[PoolRows, list[Sequence]]:
    """Of the step's sequences, sequence s having query_lens[s] rows up to ends[s] of it; and those that have some."""
    pool, pooled = PoolRows(), []
    for seq, query_len, end in zip(seqs, query_lens, ends, strict=True):
        count = _num_pooled(seq, query_len)
        if count:
            pooled.append(seq)
            pool.rows.append(end - count)
            pool.counts.append(count)
            if seq.request.pooling == "mean" and seq.num_computed:
                pool.sums.extend(seq.pool_sum)
            pool.sum_offsets.append(len(pool.sums))
    return pool, pooled


def _num_pooled(seq: Sequence, query_len: int) -> int:
    """How many of its next `query_len` rows, the last ones, count."""
    if seq.request.pooling == "mean":
        return query_len
    return int(seq.request.pooling == "last" and query_len == seq.remaining)


def take_sums(pooled: list[Sequence], sums: "array[float]") -> None:
    """Keep what a step came to: float64, C numbers for each of the sequences."""
    width = len(sums) // max(1, len(pooled))
    assert len(sums) == width * len(pooled) and (width or not pooled), f"{len(sums)} numbers for {len(pooled)} sums"
    for seq, (start, end) in zip(pooled, pairwise(range(0, len(sums) + 1, max(1, width))), strict=True):
        seq.pool_sum = sums[start:end]
