"""Sums of hidden states, for sequences that are pooled. Called by the runner, engine process.

Legend: T tokens of the step, N pooled sequences, C hidden size.
"""

from array import array
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from torch import Tensor

from scheduler.plan import PoolRows, doubles

CHUNK = 64
"""Rows that exist in float64 at the same time."""

Norm = Callable[[Tensor], Tensor]


def pooled_sums(hidden_TC: Tensor, pool: PoolRows, norm: Norm) -> "array[float]":
    """float64 [N, C]: the sum of each sequence's rows so far, as they come out of `norm`, which works row by row."""
    sums = doubles()
    carried = [pool.sums[start:end] for start, end in pairwise(pool.sum_offsets)]
    for first, count, before in zip(pool.rows, pool.counts, carried, strict=True):
        total_C = np.array(before or np.zeros(hidden_TC.shape[1]))
        for start in range(first, first + count, CHUNK):
            rows_C = norm(hidden_TC[start : min(start + CHUNK, first + count)]).double().cpu().numpy()
            # accumulate adds row after row; sum might add in another order, depending on how many there are
            total_C = np.add.accumulate(np.vstack([total_C, rows_C]), axis=0)[-1]
        sums.frombytes(total_C.tobytes())
    return sums
