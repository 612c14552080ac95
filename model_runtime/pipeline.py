"""A rank's stage of a pipeline: some of the layers, of which every stage has others. Owned by the runner, engine and
worker processes.

A step's batch goes through all stages in parts (`micro_batches.py`). The first stage embeds; each hands hidden states
on to the next, and the last one hands those that are wanted back to the first, which has the last norm and the output
matrix. They are handed back when all parts are done: until then the first stage may still be sending, and the two
would wait for each other. Several steps may be on their way.

Legend: T tokens of the step, R rows that are wanted, C hidden size.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.caches import Caches
from model_runtime.memory.steps import FLOAT_BYTES
from model_runtime.micro_batches import parts
from model_runtime.models.decoder import Decoder
from model_runtime.parallel import Collectives
from model_runtime.stripes import SharedSequences
from scheduler.plan import StepPlan


class Stage:
    """The layers of `decoder`, between those of the stages that `links` goes to and comes from."""

    def __init__(self, decoder: Decoder, links: Collectives, sequences: SharedSequences, *, every_row: bool) -> None:
        """`every_row`: all rows are wanted of every step, since a draft model goes on from them. Of `sequences` that
        ranks share, each hands on its own rows, and the last stage's ranks hand back all."""
        self._decoder, self._links, self._every_row = decoder, links, every_row
        self._sequences = sequences
        self._coming: deque[int] = deque()
        """Rows of each step that the last stage has not given, or that this one has not taken."""
        self._came: deque[Tensor] = deque()
        """[R, C] of steps that have not ended, oldest first."""

    @property
    def is_first(self) -> bool:
        """Whether the others come after it, and back to it."""
        return self._links.rank == 0

    def begin(self, plan: StepPlan, batch: Batch, kv: Caches) -> None:
        """Compute this stage's part of a step, and hand it on. Of the first stage it returns before others are done."""
        wanted_R = self._wanted(plan, batch)
        if self.is_first:
            self._take_all_but_what_fits()
            self._coming.append(len(wanted_R))
        outputs = self._outputs(batch, kv)
        if self._links.rank < self._links.size - 1:
            for x_TC in outputs:
                self._links.send(x_TC)
        else:
            self._links.send(torch.cat(list(outputs))[wanted_R])

    def end(self, plan: StepPlan, batch: Batch) -> Tensor:
        """[T, C] of the step that began first of those that have not ended: the last layer's output in rows that are
        wanted. Of the first stage only."""
        if not self._came:
            self._take()
        hidden_RC = self._came.popleft()
        hidden_TC = hidden_RC.new_empty(batch.num_tokens, hidden_RC.shape[1])
        hidden_TC[self._wanted(plan, batch)] = hidden_RC
        return hidden_TC

    def _take(self) -> None:
        hidden_RC = torch.empty(self._coming.popleft(), self._decoder.config.hidden_size)
        self._links.receive(hidden_RC)
        self._came.append(hidden_RC)

    def _take_all_but_what_fits(self) -> None:
        """The last stage must not wait for this one to take something, which may wait for the next one."""
        row_bytes = FLOAT_BYTES * self._decoder.config.hidden_size
        while not self._links.fits([row_bytes * rows for rows in self._coming]):
            self._take()

    def _outputs(self, batch: Batch, kv: Caches) -> Iterator[Tensor]:
        """[T, C] of each part of the batch: of this rank's rows, or of the last stage of all."""
        for whole in parts(batch, self._links.size):
            part = self._sequences.divided(whole)
            if self.is_first:
                yield self._decoder.forward(part, kv)
                continue
            x_TC = torch.empty(part.num_tokens, self._decoder.config.hidden_size)
            self._links.receive(x_TC)
            x_TC = self._decoder.forward_from(x_TC, part, kv)
            yield x_TC if self._links.rank < self._links.size - 1 else self._sequences.together(x_TC, part)

    def _wanted(self, plan: StepPlan, batch: Batch) -> Tensor:
        """[R], ascending: rows that are sampled, scored or pooled."""
        is_wanted_T = np.full(batch.num_tokens, self._every_row)
        for rows in (plan.sample.rows, plan.score.rows):
            is_wanted_T[np.asarray(rows)] = True
        for first, count in zip(plan.pool.rows, plan.pool.counts, strict=True):
            is_wanted_T[first : first + count] = True
        return torch.from_numpy(np.flatnonzero(is_wanted_T))
