"""Runs a decoder over a paged KV cache the way the engine does: plans of ragged batches, blocks in random order."""

import random

import torch
from torch import Tensor

from model_runtime.batch import make_batch
from model_runtime.caches import allocate_caches
from model_runtime.models.decoder import Decoder
from scheduler.plan import NO_STATE, SampleRows, ScoreRows, StateRuns, StepPlan, ints
from tests.model_runtime.op_cases import fill_with_nan

DEVICE = torch.device("cpu")


KEPT = 8
"""Sequences at most, of a model with states."""


class PagedRun:
    """A few sequences by index; `step` appends tokens to some of them and returns logits of every appended token."""

    def __init__(
        self,
        decoder: Decoder,
        block_size: int = 16,
        num_blocks: int = 64,
        kv_type: torch.dtype = torch.float32,
    ) -> None:
        config = decoder.own
        self.decoder, self.block_size = decoder, block_size
        self.kv = allocate_caches(config, num_blocks, block_size, kv_type, DEVICE, 2 * KEPT)
        fill_with_nan(self.kv)
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)
        self.lengths: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.marks: dict[int, int] = {}
        """By sequence a position where its state is kept."""
        self.states: dict[int, int] = {}
        """By sequence the slot of its newest state."""

    def plan(self, chunks: dict[int, list[int]]) -> StepPlan:
        """One step that appends a non-empty list of tokens to each of the sequences named."""
        for sequence, tokens in chunks.items():
            self.lengths[sequence] = self.lengths.get(sequence, 0) + len(tokens)
            table = self.tables.setdefault(sequence, [])
            while len(table) * self.block_size < self.lengths[sequence]:
                table.append(self.free.pop())
        return StepPlan(
            step_id=0,
            token_ids=ints([token for tokens in chunks.values() for token in tokens]),
            query_lens=ints([len(tokens) for tokens in chunks.values()]),
            kv_lens=ints([self.lengths[sequence] for sequence in chunks]),
            block_tables=ints([block for sequence in chunks for block in self.tables[sequence]]),
            sample=SampleRows(),
            score=ScoreRows(),
            states=self._runs(chunks),
        )

    def _runs(self, chunks: dict[int, list[int]]) -> StateRuns:
        """Each sequence has a slot by its number, and behind all of these one for what is kept."""
        ends, reads, writes, row = ints(), ints(), ints(), 0
        for sequence, tokens in chunks.items():
            first, end = self.lengths[sequence] - len(tokens), self.lengths[sequence]
            mark = self.marks.get(sequence, 0)
            parts = [(mark, KEPT + sequence)] if first < mark <= end else []
            for stop, slot in [*parts, *([(end, sequence)] if mark != end else [])]:
                ends.append(row + stop - first)
                reads.append(self.states.get(sequence, NO_STATE))
                writes.append(slot)
                self.states[sequence] = slot
            row += len(tokens)
        return StateRuns(ends=ends, reads=reads, writes=writes)

    def step(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        """Logits [tokens, V] float32 by sequence."""
        with torch.inference_mode():
            batch = make_batch(self.plan(chunks), self.block_size)
            logits = self.decoder.logits(self.decoder.forward(batch, self.kv))
        return dict(zip(chunks, logits.split([len(tokens) for tokens in chunks.values()]), strict=True))
