"""States behind drafts: each in a slot of its own, until it is known how many drafts hold. Blocks are of 4 tokens."""

from dataclasses import replace

import pytest

from scheduler.config import MAX_STEP_DRAFTS, SchedulerConfig, SpeculativeConfig
from scheduler.plan import FAILED_TOKEN, StepPlan, ints
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.speculation import Proposal
from scheduler.state_slots import MARK_TOKENS
from tests.scheduler.driving import CONFIG, NGRAM, answer, ask, step

PAIR = replace(CONFIG, max_num_seqs=2, speculative_config=replace(NGRAM, num_speculative_tokens=2))
LONG = replace(PAIR, max_num_batched_tokens=2000)
FIRST = 2 + 2 * 2
"""Slot of the first checkpoint, behind those of two sequences and of their drafts."""


class Stub:
    """Proposes the same tokens for every text."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = ints(tokens)

    def propose(self, seq: Sequence) -> Proposal:
        return Proposal(self.tokens, 1.0)

    def finish(self, seq: Sequence) -> None:
        pass


def make(tokens: list[int], config: SchedulerConfig = PAIR, **others: int) -> Scheduler:
    sizes = {"num_blocks": 1000, "max_model_len": 4000} | others
    return Scheduler(config, **sizes, drafter=Stub(tokens), has_states=True)


def started(tokens: list[int], num_prompt: int = 3, config: SchedulerConfig = PAIR) -> Scheduler:
    """One sequence with its first token."""
    scheduler = make(tokens, config)
    scheduler.add(ask(1, num_prompt), 0.0)
    step(scheduler)
    return scheduler


def runs(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(one past the last row, slot read, slot written)."""
    return list(zip(plan.states.ends, plan.states.reads, plan.states.writes, strict=True))


@pytest.mark.parametrize(
    ("sampled", "kept"), [([9, 9, 9], 0), ([1, 9, 9], 1), ([1, 2, 9], 2)], ids=["none", "one", "both"]
)
def test_the_text_goes_on_from_the_state_behind_the_last_draft_that_held(sampled: list[int], kept: int) -> None:
    scheduler = started([1, 2])
    assert runs(step(scheduler, sampled)) == [(1, 0, 0), (2, 0, 1), (3, 1, 2)]
    following = runs(step(scheduler, [9, 9, 9]))
    assert following[0] == (1, kept, kept)
    assert {write for _, _, write in following[1:]} == {0, 1, 2} - {kept}


def test_an_output_that_ends_within_its_drafts_leaves_all_slots() -> None:
    scheduler = make([1, 2])
    scheduler.add(ask(1, 3, max_tokens=3), 0.0)
    step(scheduler)
    step(scheduler, [1, 9])
    assert not scheduler.has_work()
    scheduler.check_invariants()
    assert sorted(scheduler.plan_relief().free_states) == list(range(FIRST + PAIR.max_state_checkpoints))


@pytest.mark.parametrize("tokens", [None, [FAILED_TOKEN, 9, 9], [1, FAILED_TOKEN, 9]], ids=["abort", "all", "draft"])
def test_a_sequence_that_is_gone_during_its_step_leaves_all_slots(tokens: list[int] | None) -> None:
    scheduler = started([1, 2])
    plan = scheduler.plan(0.0)
    assert plan is not None
    if tokens is None:
        scheduler.abort(1)
    scheduler.check_invariants()
    scheduler.commit(answer(plan, tokens or [1, 2, 9]), 0.0)
    scheduler.check_invariants()
    assert not scheduler.has_work()
    assert sorted(scheduler.plan_relief().free_states) == list(range(FIRST + PAIR.max_state_checkpoints))


@pytest.mark.parametrize(("sampled", "holds"), [([9, 9, 9], False), ([1, 9, 9], True), ([1, 2, 9], True)])
def test_a_checkpoint_behind_a_draft_is_kept_if_that_holds(sampled: list[int], holds: bool) -> None:
    """The mark lies behind the first draft."""
    scheduler = started([1, 2], MARK_TOKENS - 2, LONG)
    assert runs(step(scheduler, sampled)) == [(1, 0, 0), (2, 0, FIRST + 1), (3, FIRST + 1, 1)]
    scheduler.abort(1)
    text = [*range(1000, 1000 + MARK_TOKENS - 2), 7, sampled[0], 50, 51, 52]
    scheduler.add(ask(2, text), 0.0)
    [first, *_] = runs(step(scheduler))
    assert first[:2] == ((3, FIRST + 1) if holds else (4, FIRST))  # else from behind the prompt's last full block


def test_drafts_that_were_wrong_at_a_mark_hinder_no_checkpoint_there() -> None:
    """The mark lies behind the second draft, when the text is two tokens shorter."""
    scheduler = started([1, 2], MARK_TOKENS - 3, LONG)
    assert [end for end, _, write in runs(step(scheduler, [9, 9, 9])) if write >= FIRST] == [3]
    for _ in range(4):
        step(scheduler, [9, 9, 9])
    scheduler.abort(1)
    scheduler.add(ask(2, [*range(1000, 1000 + MARK_TOKENS - 3), 7, 9, 9, 9, 50]), 0.0)
    [(end, read, _)] = runs(step(scheduler))
    assert (end, read >= FIRST) == (2, True)


def test_a_text_goes_on_from_a_checkpoint_behind_a_draft() -> None:
    scheduler = started([1, 2], MARK_TOKENS - 2, LONG)
    step(scheduler, [1, 9, 9])
    assert runs(step(scheduler, [9, 9, 9]))[0] == (1, FIRST + 1, 0)


def test_drafts_are_no_more_than_there_are_slots() -> None:
    """And a sequence that may begin to run finds one."""
    scheduler = make([1, 2, 3, 4, 5, 6])
    scheduler.add(ask(1, 3), 0.0)
    step(scheduler)
    assert len(runs(step(scheduler, [1, 2, 3, 9, 9]))) == 5
    scheduler.add(ask(2, 3), 0.0)
    plan = step(scheduler, [9] * 6)
    assert plan.query_lens.tolist() == [5, 3]
    *drafted, other = (write for _, _, write in runs(plan))
    assert other not in drafted
    assert step(scheduler, [9] * 6).query_lens.tolist() == [5, 1]


def test_steps_in_flight_share_the_slots_of_drafts() -> None:
    scheduler = make([1, 2, 3], steps_in_flight=2)
    for seq_id in (1, 2):
        scheduler.add(ask(seq_id, 3), 0.0)
    first = scheduler.plan(0.0)
    assert first is not None
    scheduler.commit(answer(first), 0.0)
    plans = [scheduler.plan(0.0), scheduler.plan(0.0)]
    sizes = [plan.query_lens.tolist() for plan in plans if plan is not None]
    assert sizes == [[4], [2]]  # three drafts, and one of the four slots was left
    scheduler.check_invariants()
    for plan in plans:
        assert plan is not None
        scheduler.commit(answer(plan, 9), 0.0)
        scheduler.check_invariants()


def test_there_are_slots_for_all_drafts_of_a_step() -> None:
    def num_states(seqs: int, drafts: int) -> int:
        speculative = SpeculativeConfig(method="suffix", num_speculative_tokens=drafts)
        return SchedulerConfig(
            max_num_seqs=seqs, max_num_batched_tokens=64, max_state_checkpoints=5, speculative_config=speculative
        ).num_states

    assert num_states(2, 3) == 2 + 2 * 3 + 5
    assert num_states(20, 3) == 20 + MAX_STEP_DRAFTS + 5
