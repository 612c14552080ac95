"""Drafts from a draft model: before a step of the model, a few steps of the draft model that sample a token each.

Owned by `speculation.Speculation`, engine process. A draft is sampled as the model's token would be: with the same
parameters, bans and mask, and with the same random number, which is a function of the seed and the index of the token.
Where both models have similar distributions they so choose the same token, also at a temperature.

A draft model with a cache of its own has its keys and values under the block numbers of the model's. It computes a text
when it first drafts for it, or goes on with it, in chunks; what it has computed is a count, like the model's.

A layer for multi-token prediction does so too. Behind its first draft it has no output of the model to go on from but
its own, so it computes these rows again when the model has been there. Its last row of a block depends on the token
behind the block: of sequences that share it, that of the last one there counts; drafts of others may be worse.
"""

from array import array
from dataclasses import dataclass, field, replace

from scheduler.guesses import Guesses
from scheduler.image_spans import add_rope_rows
from scheduler.kv_blocks import KVBlocks
from scheduler.masks import TokenMasks
from scheduler.plan import FAILED_TOKEN, NO_LOGPROBS, ScoreRows, StepPlan, StepResult, ints
from scheduler.sampling_rows import SampledRows
from scheduler.sequence import Sequence, Status
from scheduler.speculation import NO_PROPOSAL, Proposal, StepCost

FIRST_RATE = 0.9
"""A draft model is trusted until it has shown what its drafts are worth,"""
RATE_RETURN = 0.01
"""and, where they are not worth it, so much more with every step without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """What a draft model may do, and what it costs."""

    num_tokens: int
    """The most drafts of a sequence."""
    cost: StepCost
    own_cache: bool
    """Whether it has keys and values of its own; else it is the beginning of the model and leaves the model's."""
    block_size: int
    lag: int
    """Rows that a text has fewer than tokens: 1 for a layer for multi-token prediction, whose row at a position goes on
    from the model's output there, and takes the token that follows."""
    max_tokens: int
    """That it computes in a step."""


@dataclass(slots=True, eq=False)
class _Drafting:
    """The drafts of one sequence for the next step."""

    seq: Sequence
    guesses: Guesses
    wanted: int
    tokens: "array[int]" = field(default_factory=ints)


@dataclass(slots=True)
class _Rows:
    """What a step does for one sequence."""

    drafting: _Drafting
    kv_len: int
    samples: bool


class ModelDrafter:
    """Plans the draft model's steps, of which none may be in flight when the model's next step is planned."""

    def __init__(self, model: DraftLimits, masks: TokenMasks | None) -> None:
        self._model = model
        self._sampled = SampledRows(masks)
        self._drafting: dict[int, _Drafting] | None = None
        """By seq_id; None when the model's next step has not been prepared."""
        self._planned: list[_Rows] = []

    def plan(self, step_id: int, decodes: list[Sequence], kv: KVBlocks) -> StepPlan | None:
        """The draft model's next step; None when all that is worth it has been drafted for `decodes`."""
        assert not self._planned, f"step {step_id - 1} was planned and not committed"
        if self._drafting is None:
            self._drafting = self._begin(decodes)
        room, planned = self._model.max_tokens, []
        for drafting in self._drafting.values():
            if room and drafting.seq.status is Status.RUNNING and len(drafting.tokens) < drafting.wanted:
                rows = self._rows(drafting, room, kv, spare=len(decodes))
                if rows is not None:
                    room -= rows.kv_len - drafting.guesses.computed
                    planned.append(rows)
        self._planned = planned
        return self._build(step_id, planned) if planned else None

    def commit(self, result: StepResult) -> bool:
        """Take the result of a step; False if none was planned here."""
        planned, self._planned = self._planned, []
        row = 0
        for rows in planned:
            drafting = rows.drafting
            drafting.guesses.computed = rows.kv_len
            if rows.samples:
                drafting.tokens.append(result.token_ids[row])
                row += 1
            if not rows.samples or drafting.tokens[-1] == FAILED_TOKEN:
                drafting.wanted = 0
        return bool(planned)

    def propose(self, seq: Sequence) -> Proposal:
        """What was drafted."""
        drafting = (self._drafting or {}).get(seq.request.seq_id)
        if drafting is None or FAILED_TOKEN in drafting.tokens:
            return NO_PROPOSAL
        drafting.guesses.tokens, drafting.guesses.position = drafting.tokens, len(seq.tokens)
        return Proposal(drafting.tokens, drafting.guesses.rate)

    def step_is_planned(self) -> None:
        """The model's next step has its drafts; those for the one after it come next."""
        for drafting in (self._drafting or {}).values() if self._model.lag else ():
            guesses = drafting.guesses
            guesses.computed = min(guesses.computed, len(drafting.seq.tokens) - self._model.lag)
        self._drafting = None

    def finish(self, seq: Sequence) -> None:
        """Nothing is kept."""

    def _begin(self, decodes: list[Sequence]) -> dict[int, _Drafting]:
        suited = [seq for seq in decodes if not (self._model.own_cache and seq.image_end)]
        suited = [seq for seq in suited if len(seq.tokens) > self._model.lag]
        drafting = [_Drafting(seq, self._guesses(seq), 0) for seq in suited]
        self._choose_counts(drafting, len(decodes))
        return {each.seq.request.seq_id: each for each in drafting if each.wanted}

    def _guesses(self, seq: Sequence) -> Guesses:
        """With the last guess judged, and what has been computed of the text as it went on."""
        if seq.guesses is None:
            seq.guesses = Guesses([FIRST_RATE])
        guesses = seq.guesses
        guesses.judge(seq.tokens)
        if not guesses.tokens:
            guesses.rates[0] += RATE_RETURN * (FIRST_RATE - guesses.rate)
        guesses.tokens = ints()
        known = len(seq.tokens) - 1 - self._model.lag
        guesses.computed = min(guesses.computed, known) if self._model.own_cache else known
        return guesses

    def _choose_counts(self, drafting: list[_Drafting], num_decodes: int) -> None:
        """How many drafts of each are wanted. As in `speculation.choose_drafts`, a round of drafts is worth it if the
        tokens that it can be expected to give outweigh the longer step and the step of the draft model."""
        cost = self._model.cost
        expected, rows = float(num_decodes), cost.fixed_rows + num_decodes
        chances = [each.guesses.rate for each in drafting]
        for count in range(1, self._model.num_tokens + 1):
            active = [
                index
                for index, each in enumerate(drafting)
                if each.wanted == count - 1
                and len(each.seq.tokens) + count < each.seq.max_total
                and chances[index] * rows > expected
            ]
            gain = sum(chances[index] for index in active)
            price = len(active) + cost.draft_step * (cost.fixed_rows + len(active))
            if gain * rows <= expected * price:
                return
            expected, rows = expected + gain, rows + price
            for index in active:
                drafting[index].wanted = count
                chances[index] *= drafting[index].guesses.rate

    def _rows(self, drafting: _Drafting, room: int, kv: KVBlocks, *, spare: int) -> _Rows | None:
        """The next tokens of a sequence, at most `room`; None where no blocks are left for them beside `spare` ones."""
        seq, computed = drafting.seq, drafting.guesses.computed
        lag = self._model.lag
        known = len(seq.tokens) + len(drafting.tokens) - lag
        kv_len = min(known, computed + room)
        if kv.cover(seq, kv_len + lag, spare=spare) < kv_len + lag:
            drafting.wanted = 0
            return None
        return _Rows(drafting, kv_len, kv_len == known)

    def _build(self, step_id: int, planned: list[_Rows]) -> StepPlan:
        token_ids, tables, rope, normed_slots = ints(), ints(), ints(), ints()
        query_lens, last_rows, block_size = [], [], self._model.block_size
        with_rope = any(rows.drafting.seq.request.images.rope_positions for rows in planned)
        for rows in planned:
            seq, computed = rows.drafting.seq, rows.drafting.guesses.computed
            first = computed + self._model.lag
            following = seq.tokens[first:] + rows.drafting.tokens[max(0, first - len(seq.tokens)) :]
            token_ids.extend(following[: rows.kv_len - computed])
            query_lens.append(rows.kv_len - computed)
            tables.extend(seq.blocks[: -(-rows.kv_len // block_size)])
            if with_rope:
                add_rope_rows(rope, seq, computed, rows.kv_len)
            if rows.samples:
                last_rows.append(len(token_ids) - 1)
                if self._model.lag:
                    normed_slots.append(seq.blocks[rows.kv_len // block_size] * block_size + rows.kv_len % block_size)
        sampled = [rows.drafting for rows in planned if rows.samples]
        sample = self._sampled.of_step(
            [drafting.seq for drafting in sampled], [drafting.tokens for drafting in sampled], ints(last_rows)
        )
        return StepPlan(
            step_id=step_id,
            token_ids=token_ids,
            query_lens=ints(query_lens),
            kv_lens=ints([rows.kv_len for rows in planned]),
            block_tables=tables,
            sample=replace(sample, top_logprobs=ints([NO_LOGPROBS] * len(sampled))),
            score=ScoreRows(),
            rope_positions=rope,
            adapted=ints([index for index, rows in enumerate(planned) if rows.drafting.seq.is_adapted]),
            by_draft_model=True,
            normed_slots=normed_slots,
        )
