"""Runs a decoder over a paged KV cache the way the engine does: plans of ragged batches, blocks in random order."""

import random

import torch
from torch import Tensor

from model_runtime.batch import make_batch
from model_runtime.caches import allocate_caches
from model_runtime.models.decoder import Decoder
from scheduler.plan import SampleRows, ScoreRows, StepPlan, ints

DEVICE = torch.device("cpu")


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
        self.kv = allocate_caches(config, num_blocks, block_size, kv_type, DEVICE)
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)
        self.lengths: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}

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
        )

    def step(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        """Logits [tokens, V] float32 by sequence."""
        with torch.inference_mode():
            batch = make_batch(self.plan(chunks), self.block_size)
            logits = self.decoder.logits(self.decoder.forward(batch, self.kv))
        return dict(zip(chunks, logits.split([len(tokens) for tokens in chunks.values()]), strict=True))
