"""Collects the sequences of one step into a StepPlan. Used by `Scheduler.plan`, engine process."""

from array import array
from collections.abc import Callable
from typing import NamedTuple

from scheduler.image_spans import add_rope_rows, add_span_rows
from scheduler.plan import ImageJobs, ImageSpans, ScoreRows, StepPlan, ints
from scheduler.sampling_rows import add_score_rows, sample_rows
from scheduler.sequence import Sequence


class PlannedSequence(NamedTuple):
    """What a step does for one sequence, in the order of the plan."""

    seq: Sequence
    num_tokens: int
    samples: bool
    num_scored: int
    """Prompt rows whose log-probability is reported."""


class PlanBuilder:
    """An empty step; `add` fills it. `slot` tells where the embeddings of an image are."""

    def __init__(self, block_size: int, slot: Callable[[bytes], int]) -> None:
        self._block_size = block_size
        self._slot = slot
        self._token_ids = ints()
        self._query_lens = ints()
        self._kv_lens = ints()
        self._block_tables = ints()
        self._sampled: list[Sequence] = []
        self._sampled_rows = ints()
        self._score = ScoreRows()
        self._images = ImageSpans()
        self._has_rope = False
        self.planned: list[PlannedSequence] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the step so far."""
        return len(self._token_ids)

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Compute the next `num_tokens` known tokens of a sequence whose block table covers them."""
        row = len(self._token_ids)
        kv_len = seq.num_computed + num_tokens
        num_blocks = -(-kv_len // self._block_size)
        assert len(seq.blocks) >= num_blocks, "a step without the blocks that it writes"
        self._token_ids.extend(seq.tokens[seq.num_computed : kv_len])
        self._query_lens.append(num_tokens)
        self._kv_lens.append(kv_len)
        self._block_tables.extend(seq.blocks[:num_blocks])
        num_scored = add_score_rows(self._score, seq, num_tokens, row) if seq.scores_prompt else 0
        if seq.num_computed < seq.image_end:
            add_span_rows(self._images, seq, num_tokens, row, self._slot)
        if seq.image_end:
            self._has_rope = self._has_rope or bool(seq.request.images.rope_positions)
        samples = kv_len == len(seq.tokens)
        if samples:
            self._sampled.append(seq)
            self._sampled_rows.append(row + num_tokens - 1)
        self.planned.append(PlannedSequence(seq, num_tokens, samples, num_scored))

    def build(self, step_id: int, encode: ImageJobs, drop_slots: "array[int]") -> StepPlan:
        """The finished plan."""
        return StepPlan(
            step_id=step_id,
            token_ids=self._token_ids,
            query_lens=self._query_lens,
            kv_lens=self._kv_lens,
            block_tables=self._block_tables,
            sample=sample_rows(self._sampled, self._sampled_rows),
            score=self._score,
            rope_positions=self._rope_rows(),
            drop_slots=drop_slots,
            encode=encode,
            images=self._images,
        )

    def _rope_rows(self) -> "array[int]":
        """Of every token, if one of them needs them."""
        rows = ints()
        if self._has_rope:
            for (seq, num_tokens, _, _), kv_len in zip(self.planned, self._kv_lens, strict=True):
                add_rope_rows(rows, seq, kv_len - num_tokens, kv_len)
        return rows
