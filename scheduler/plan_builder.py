"""Collects the sequences of one step into a StepPlan. Used by `Scheduler.plan`, engine process."""

from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate, compress
from operator import add, sub
from typing import NamedTuple

from scheduler.image_spans import add_rope_rows, add_span_rows
from scheduler.plan import ImageJobs, ImageSpans, SampleRows, ScoreRows, StateRuns, StepPlan, ints
from scheduler.pooling import pool_rows
from scheduler.sampling_rows import SampledRows, add_score_rows
from scheduler.sequence import Sequence
from scheduler.state_slots import StateSlots

NO_DRAFTS = ints()


class Planned(NamedTuple):
    """What a step does. Every list but `pooled` has an entry for each of its sequences."""

    seqs: list[Sequence]
    num_tokens: list[int]
    """Known tokens that are computed."""
    drafts: "list[array[int]]"
    """int32: guesses of the tokens that follow them, computed too."""
    num_samples: list[int]
    """Rows that are sampled: the last known token, if it is among them, and each draft."""
    num_scored: list[int]
    """Prompt rows that are scored."""
    pooled: list[Sequence]
    """Those with rows that are summed, in the order of the result's sums."""

    def by_sequence(self) -> "Iterator[tuple[Sequence, int, array[int], int, int]]":
        """One entry of each other list, sequence by sequence."""
        return zip(self.seqs, self.num_tokens, self.drafts, self.num_samples, self.num_scored, strict=True)


class PlanBuilder:
    """An empty step; `add` fills it. `sampled` makes the rows that sample, `slot` tells where the embeddings of an
    image are, `states` where states are, in a model that has them.

    `build` works column by column, as `sampling_rows` does.
    """

    def __init__(
        self, block_size: int, sampled: SampledRows, slot: Callable[[bytes], int], states: StateSlots | None = None
    ) -> None:
        self._block_size = block_size
        self._sampled, self._states = sampled, states
        self._slot = slot
        self._seqs: list[Sequence] = []
        self._query_lens: list[int] = []
        self._drafts: list[array[int]] = []
        self._adapted = ints()
        self.num_tokens = 0
        """Tokens of the step so far."""

    def add(self, seq: Sequence, num_tokens: int, drafts: "array[int]" = NO_DRAFTS) -> None:
        """Compute the next `num_tokens` known tokens of a sequence, and after the last one `drafts`; its block table
        covers them all."""
        query_len = num_tokens + len(drafts)
        if seq.is_adapted:
            self._adapted.append(len(self._seqs))
        self._seqs.append(seq)
        self._query_lens.append(query_len)
        self._drafts.append(drafts)
        self.num_tokens += query_len

    def build(self, step_id: int, encode: ImageJobs, drop_slots: "array[int]") -> tuple[StepPlan, Planned]:
        """The finished plan, and what it does."""
        seqs, query_lens = self._seqs, self._query_lens
        kv_lens = [seq.num_computed + num_tokens for seq, num_tokens in zip(seqs, query_lens, strict=True)]
        samples = [
            kv_len >= len(seq.tokens) and seq.request.pooling is None for seq, kv_len in zip(seqs, kv_lens, strict=True)
        ]
        ends = [*accumulate(query_lens)]
        score, num_scored = self._score_rows(ends)
        pool, pooled = pool_rows(seqs, query_lens, ends)
        plan = StepPlan(
            step_id=step_id,
            token_ids=self._token_ids(kv_lens),
            query_lens=ints(query_lens),
            kv_lens=ints(kv_lens),
            block_tables=self._block_tables(kv_lens),
            sample=self._sampled_rows(samples, ends),
            score=score,
            rope_positions=self._rope_rows(kv_lens),
            drop_slots=drop_slots,
            encode=encode,
            images=self._span_rows(ends),
            pool=pool,
            adapted=self._adapted,
            states=StateRuns() if self._states is None else self._state_runs(self._states, kv_lens, ends),
        )
        num_drafts = [*map(len, self._drafts)]
        num_tokens, num_samples = [*map(sub, query_lens, num_drafts)], [*map(add, samples, num_drafts)]
        return plan, Planned(seqs, num_tokens, self._drafts, num_samples, num_scored, pooled)

    def _token_ids(self, kv_lens: list[int]) -> "array[int]":
        token_ids = ints()
        for seq, kv_len, drafts in zip(self._seqs, kv_lens, self._drafts, strict=True):
            token_ids.extend(seq.tokens[seq.num_computed : kv_len])
            if drafts:
                token_ids.extend(drafts)
        return token_ids

    def _sampled_rows(self, samples: list[bool], ends: list[int]) -> SampleRows:
        """The last known token of each sequence that samples, and the drafts that follow it."""
        seqs, last = [*compress(self._seqs, samples)], [*compress(ends, samples)]
        if not any(self._drafts):
            return self._sampled.of_step(seqs, [NO_DRAFTS] * len(seqs), ints([end - 1 for end in last]))
        rows = [
            (seq, drafts[:count], end - 1 - len(drafts) + count)
            for seq, drafts, end in zip(seqs, compress(self._drafts, samples), last, strict=True)
            for count in range(len(drafts) + 1)
        ]
        return self._sampled.of_step(
            [seq for seq, _, _ in rows], [before for _, before, _ in rows], ints([row for _, _, row in rows])
        )

    def _block_tables(self, kv_lens: list[int]) -> "array[int]":
        tables = ints()
        for seq, kv_len in zip(self._seqs, kv_lens, strict=True):
            num_blocks = -(-kv_len // self._block_size)
            assert len(seq.blocks) >= num_blocks, "a step without the blocks that it writes"
            tables.extend(seq.blocks if len(seq.blocks) == num_blocks else seq.blocks[:num_blocks])
        return tables

    def _score_rows(self, ends: list[int]) -> tuple[ScoreRows, list[int]]:
        """The scored prompt rows, and how many there are of each sequence."""
        score, counts = ScoreRows(), [0] * len(ends)
        for index, seq in enumerate(self._seqs):
            if seq.scores_prompt:
                num_tokens = self._query_lens[index]
                counts[index] = add_score_rows(score, seq, num_tokens, ends[index] - num_tokens)
        return score, counts

    def _span_rows(self, ends: list[int]) -> ImageSpans:
        images = ImageSpans()
        for seq, num_tokens, end in zip(self._seqs, self._query_lens, ends, strict=True):
            if seq.num_computed < seq.image_end:
                add_span_rows(images, seq, num_tokens, end - num_tokens, self._slot)
        return images

    def _state_runs(self, states: StateSlots, kv_lens: list[int], ends: list[int]) -> StateRuns:
        runs = StateRuns()
        for seq, kv_len, end in zip(self._seqs, kv_lens, ends, strict=True):
            for run_end, read, write in states.runs(seq, kv_len):
                runs.ends.append(end - kv_len + run_end)
                runs.reads.append(read)
                runs.writes.append(write)
        return runs

    def _rope_rows(self, kv_lens: list[int]) -> "array[int]":
        """Of every token, if one of them needs them."""
        rows = ints()
        if any(seq.image_end and seq.request.images.rope_positions for seq in self._seqs):
            for seq, num_tokens, kv_len in zip(self._seqs, self._query_lens, kv_lens, strict=True):
                add_rope_rows(rows, seq, kv_len - num_tokens, kv_len)
        return rows
