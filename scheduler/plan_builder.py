"""Collects the sequences of one step into a StepPlan. Used by `Scheduler.plan`, engine process."""

from typing import NamedTuple

from scheduler.plan import ScoreRows, StepPlan, ints
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
    """An empty step; `add` fills it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids = ints()
        self._query_lens = ints()
        self._kv_lens = ints()
        self._block_tables = ints()
        self._sampled: list[Sequence] = []
        self._sampled_rows = ints()
        self._score = ScoreRows()
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
        samples = kv_len == len(seq.tokens)
        if samples:
            self._sampled.append(seq)
            self._sampled_rows.append(row + num_tokens - 1)
        self.planned.append(PlannedSequence(seq, num_tokens, samples, num_scored))

    def build(self, step_id: int) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            step_id=step_id,
            token_ids=self._token_ids,
            query_lens=self._query_lens,
            kv_lens=self._kv_lens,
            block_tables=self._block_tables,
            sample=sample_rows(self._sampled, self._sampled_rows),
            score=self._score,
        )
