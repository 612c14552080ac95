"""Speculative decoding: guessing tokens that follow, so that a step computes several of them, and what of it holds.

Owned by `Scheduler`, engine process. A draft is verified by sampling. A step computes a sequence's newest token and its
drafts, and samples every row exactly as it would be without speculation: random numbers are a function of the seed and
the index of the output token, and a row's result does not depend on the rows beside it. As long as what was sampled is
what was drafted, the next row stands where the text went on, and its token is the one that a step of its own would have
sampled. So the output is the same token for token, greedy or not, log-probabilities and all. For a draft that is one
token, not a distribution, this is rejection sampling (Leviathan et al., arXiv 2211.17192): a draft x is accepted with
probability p(x), and the token that is sampled in place of a rejected one has distribution p without x, renormalised.
"""

from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler.kv_blocks import KVBlocks
from scheduler.plan import StepPlan, StepResult, ints
from scheduler.plan_builder import NO_DRAFTS
from scheduler.request import TokenEvent
from scheduler.sequence import Sequence
from scheduler.stats import SpeculationStats

FIXED_ROWS = 8.0
"""What a step costs beside its rows (above all reading the weights), in rows: on two cores, n rows of SmolLM2-135M take
5.2 + 0.7 n ms in 4 bits, 6.5 + 0.6 n ms in 8 bits, 10.7 + 0.6 n ms in bfloat16 (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What steps cost, from which is reckoned which drafts are worth their rows."""

    fixed_rows: float = FIXED_ROWS
    """Of the model's step, beside its rows, in rows."""
    draft_step: float = 0.0
    """A step of the draft model, in steps of the model; 0 without one."""


ANY_STEP = StepCost()


def verify(sampled: Tokens[int], drafts: Tokens[int]) -> int:
    """How many drafts hold: sampled[i] is what follows drafts[:i], so all before the first that differ."""
    for count, draft in enumerate(drafts):
        if sampled[count] != draft:
            return count
    return len(drafts)


class Proposal(NamedTuple):
    """A guess of the tokens that follow a text."""

    tokens: "array[int]"
    """int32"""
    rate: float
    """How likely each is to hold when those before it do."""


NO_PROPOSAL = Proposal(ints(), 0.0)


class Drafter(Protocol):
    """Where guesses come from."""

    def propose(self, seq: Sequence) -> Proposal:
        """What might follow the tokens of a running sequence."""
        ...

    def finish(self, seq: Sequence) -> None:
        """The sequence has ended."""
        ...


class DraftSteps(Protocol):
    """Steps in which drafts are made (`draft_model.ModelDrafter`)."""

    def plan(self, step_id: int, decodes: list[Sequence], kv: KVBlocks) -> StepPlan | None:
        """The next one before the step that verifies; None if there is none."""
        ...

    def commit(self, result: StepResult) -> bool:
        """Take the result of a step; False if none was planned here."""
        ...

    def step_is_planned(self) -> None:
        """The step that verifies is planned."""
        ...


class Speculation:
    """Decides how many drafts a step has, and counts what became of them. Without a drafter there are none."""

    def __init__(
        self, drafter: Drafter | None, steps: DraftSteps | None = None, fixed_rows: float = FIXED_ROWS
    ) -> None:
        """`steps` are those that the drafter needs."""
        self._drafter, self._steps, self._fixed_rows = drafter, steps, fixed_rows
        self._drafts = self._draft_tokens = 0
        self._accepted: list[int] = []

    @property
    def has_steps(self) -> bool:
        """Whether drafts take steps of their own."""
        return self._steps is not None

    def draft_step(self, step_id: int, decodes: list[Sequence], kv: KVBlocks) -> StepPlan | None:
        """A step that has to come before the next one of the model, to draft for `decodes`."""
        return None if self._steps is None else self._steps.plan(step_id, decodes, kv)

    def take_drafts(self, result: StepResult) -> bool:
        """Take the result of such a step; False if it is of another."""
        return self._steps is not None and self._steps.commit(result)

    def drafts(self, decodes: list[Sequence], chunk_tokens: int, limit: int, kv: KVBlocks) -> "list[array[int]]":
        """Drafts of each of `decodes`, with blocks to hold them. The step's chunks of prompts have `chunk_tokens` of
        the `limit` that the decodes' newest tokens leave."""
        if self._drafter is None:
            return [NO_DRAFTS] * len(decodes)
        num_rows = len(decodes) + chunk_tokens
        room = min(limit - chunk_tokens, kv.draft_room)
        chosen = choose_drafts(self._drafter, decodes, num_rows, room, self._fixed_rows)
        if self._steps is not None:
            self._steps.step_is_planned()
        return [
            drafts and drafts[: kv.cover(seq, len(seq.tokens) + len(drafts)) - len(seq.tokens)]
            for seq, drafts in zip(decodes, chosen, strict=True)
        ]

    def count(self, event: TokenEvent) -> None:
        """A step had drafts of a sequence; all tokens of the event but the last are drafts that held."""
        accepted = len(event.token_ids) - 1
        self._drafts += 1
        self._draft_tokens += event.num_drafts
        self._accepted += [0] * (accepted - len(self._accepted))
        for position in range(accepted):
            self._accepted[position] += 1

    def finish(self, seq: Sequence) -> None:
        """The sequence has ended."""
        if self._drafter is not None:
            self._drafter.finish(seq)

    def stats(self) -> SpeculationStats:
        """The counters as of now."""
        return SpeculationStats(
            drafts=self._drafts,
            draft_tokens=self._draft_tokens,
            accepted_tokens=sum(self._accepted),
            accepted_per_position=tuple(self._accepted),
        )


def choose_drafts(
    drafter: Drafter, decodes: list[Sequence], num_rows: int, room: int, fixed_rows: float
) -> "list[array[int]]":
    """Drafts for each of `decodes` in a step that has `num_rows` rows already and holds `room` more.

    A step of n rows takes as long as `fixed_rows` + n rows. A draft is worth it if the chance that it becomes a token
    raises the tokens that can be expected in that time; so the more sequences share a step, the surer a draft must be.
    """
    expected, rows = float(num_rows), num_rows
    chosen = []
    for seq in decodes:
        tokens, rate = drafter.propose(seq)
        most = min(len(tokens), room, seq.max_total - len(seq.tokens) - 1)
        chance, count = rate, 0
        while count < most and chance * (fixed_rows + rows) > expected:
            expected += chance
            chance *= rate
            rows += 1
            count += 1
        room -= count
        chosen.append(tokens[:count])
    return chosen
