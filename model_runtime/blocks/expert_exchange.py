"""Experts divided among ranks that compute different tokens (expert parallelism, GShard, arXiv 2006.16668): rows go to
the rank that has their expert, and what it computes comes back. Used by `moe.py`, engine and worker processes.

All ranks take part in every exchange, those without rows too. Rows go in rounds of a bounded number, since all of them
may want experts of one rank.

Legend: P pairs of a token and an expert, ascending by expert, Q pairs that came here, C hidden size, N experts.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from model_runtime.memory.steps import EXCHANGED_ROWS
from model_runtime.parallel import Collectives

Compute = Callable[[Tensor, Tensor], Tensor]
"""[Q, C] of the rows [Q, C] and the experts [Q] that compute them."""


class ExpertExchange:
    """What a rank does with the others of its group."""

    def __init__(self, ranks: Collectives, num_experts: list[int]) -> None:
        """`num_experts` that each rank has, one rank after the other."""
        self._ranks = ranks
        self._owner_N = torch.arange(ranks.size).repeat_interleave(torch.tensor(num_experts))
        self._most = max(1, EXCHANGED_ROWS // ranks.size)

    def rounds(self, x_TC: Tensor, expert_P: Tensor, row_P: Tensor, compute: Compute) -> Iterator[tuple[slice, Tensor]]:
        """(which pairs, their outputs) until all are done. `compute` is called for rows of any rank."""
        owned = torch.bincount(self._owner_N[expert_P], minlength=self._ranks.size)
        ends_RR = torch.stack(self._ranks.all_gather(owned)).cumsum(1)
        for start in range(0, int(ends_RR[:, -1].max()), self._most):
            stop_RR = ends_RR.clamp(start, start + self._most)
            counts = stop_RR.diff(dim=1, prepend=torch.full_like(stop_RR[:, :1], start))
            some, there, back = slice(start, start + self._most), counts.tolist(), counts.T.tolist()
            rows_QC = self._ranks.all_to_all(x_TC[row_P[some]], there)
            experts_Q = self._ranks.all_to_all(expert_P[some], there)
            yield some, self._ranks.all_to_all(compute(rows_QC, experts_Q), back)
