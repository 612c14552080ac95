"""Sequences that are pooled: which rows count, what goes out and comes back, and how they end."""

from array import array
from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import pytest

from scheduler.fake_runtime import FakeRuntime
from scheduler.plan import StepPlan, doubles
from scheduler.request import FinishReason, NeverFits, Pooling, Request, TokenEvent
from scheduler.scheduler import Scheduler
from tests.scheduler.driving import NGRAM, answer, ask, make, sizes, step, with_config

SMALL = with_config(max_num_batched_tokens=8, max_num_seqs=2, prefill_share=1.0)
SMALL_SHARE = replace(SMALL, prefill_share=0.25)


def pool(seq_id: int, prompt: list[int] | int, pooling: Pooling) -> Request:
    return replace(ask(seq_id, prompt), pooling=pooling)


def give(scheduler: Scheduler, *sums: float) -> tuple[StepPlan, list[TokenEvent]]:
    """A step whose result has these sums; the plan, and what happened."""
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.commit(replace(answer(plan), pooled=doubles(sums)), 0.0)
    scheduler.check_invariants()
    return plan, scheduler.take_events()


def sums_of(plan: StepPlan) -> list[list[float]]:
    ends = plan.pool.sum_offsets
    return [plan.pool.sums[start:end].tolist() for start, end in pairwise(ends)]


def test_sum_of_a_mean_travels_with_its_chunks() -> None:
    scheduler = make(config=SMALL)
    scheduler.add(pool(0, 18, "mean"), 0.0)
    first, nothing = give(scheduler, 1.5, 2.5)
    assert (sizes(first), first.pool.rows.tolist(), first.pool.counts.tolist()) == ([8], [0], [8])
    assert (sums_of(first), nothing) == ([[]], [])
    second, nothing = give(scheduler, 3.5, 4.5)
    assert (sums_of(second), nothing) == ([[1.5, 2.5]], [])
    last, [event] = give(scheduler, 5.5, 6.5)
    assert (sizes(last), sums_of(last)) == ([2], [[3.5, 4.5]])
    assert event == TokenEvent(0, finish_reason=FinishReason.STOP, pooled=array("d", [5.5, 6.5]).tobytes())
    assert not any(len(plan.sample.rows) for plan in (first, second, last))
    assert (scheduler.stats().prompt_tokens, scheduler.stats().generation_tokens) == (18, 0)


def test_last_needs_one_row_and_takes_hits() -> None:
    scheduler = make(config=SMALL)
    for seq_id in (0, 1):
        scheduler.add(pool(seq_id, list(range(10)), "last"), 0.0)
        plans = [] if seq_id else [give(scheduler)[0]]
        assert not any(plan.pool.rows for plan in plans)
        last, [event] = give(scheduler, 7.0)
        assert (last.pool.rows.tolist(), last.pool.counts.tolist(), sums_of(last)) == ([1], [1], [[]])
        assert event.cached_tokens == 8 * seq_id


def test_mean_needs_every_row_whatever_is_cached() -> None:
    scheduler = make(config=SMALL)
    for seq_id in (0, 1):
        scheduler.add(pool(seq_id, list(range(8)), "mean"), 0.0)
        plan, [event] = give(scheduler, 7.0)
        assert (sizes(plan), plan.pool.counts.tolist(), event.cached_tokens) == ([8], [8], 0)
    assert scheduler.stats().prefix_queries == 0
    scheduler.add(ask(2, list(range(8)), max_tokens=1), 0.0)
    assert sizes(step(scheduler)) == [4], "what was pooled is there for others"


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_prompt_may_be_as_long_as_the_model(pooling: Pooling) -> None:
    scheduler = make(num_blocks=4, max_model_len=16)
    scheduler.add(pool(0, 16, pooling), 0.0)
    _, [event] = give(scheduler, 1.0)
    assert event.finish_reason is FinishReason.STOP
    with pytest.raises(NeverFits, match="17 tokens, and at most 16"):
        scheduler.add(pool(1, 17, pooling), 0.0)


@pytest.mark.parametrize("number", [inf, -inf, nan])
def test_sum_that_is_not_finite_ends_one_sequence(number: float) -> None:
    scheduler = make()
    for seq_id in (0, 1):
        scheduler.add(pool(seq_id, 8, "mean"), 0.0)
    _, events = give(scheduler, 1.0, number, 1.0, 2.0)
    assert [(event.seq_id, event.finish_reason) for event in events] == [(0, "error"), (1, "stop")]
    scheduler.add(ask(2, list(range(8))), 0.0)
    assert sizes(step(scheduler)) == [8], "nobody takes its blocks"


def test_aborted_between_plan_and_commit() -> None:
    scheduler = make()
    for seq_id in (0, 1):
        scheduler.add(pool(seq_id, 8, "mean"), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.abort(0)
    scheduler.commit(replace(answer(plan), pooled=doubles([1.0, 2.0])), 0.0)
    events = [(event.seq_id, event.finish_reason, event.pooled) for event in scheduler.take_events()]
    assert events == [(0, "abort", b""), (1, "stop", array("d", [2.0]).tobytes())]
    assert not scheduler.has_work()


def test_nothing_is_guessed_for_it() -> None:
    """A prompt of one token looks like a sequence that samples its next one."""
    scheduler = make(config=with_config(speculative_config=NGRAM))
    scheduler.add(ask(0, [5, 6, 5, 6, 5], max_tokens=20), 0.0)
    step(scheduler, tokens=6)
    scheduler.add(pool(1, [5], "last"), 0.0)
    plan, events = give(scheduler, 1.0)
    assert plan.query_lens[1] == 1
    assert [event.seq_id for event in events if event.pooled] == [1]


def test_preempted_mean_begins_again() -> None:
    """The sums are those of an undisturbed run, which the fake runtime computes from the text."""
    found = {}
    for num_blocks in (100, 6):
        scheduler, runtime = make(num_blocks=num_blocks, config=SMALL_SHARE), FakeRuntime(num_blocks, 4)
        scheduler.add(replace(ask(0, [5, 6, 7, 8], max_tokens=16), priority=-1), 0.0)
        scheduler.add(pool(1, [*range(2, 16)], "mean"), 0.0)
        while (plan := scheduler.plan(0.0)) is not None:
            scheduler.commit(runtime.execute(plan), 0.0)
        (found[num_blocks],) = (event.pooled for event in scheduler.take_events() if event.pooled)
        assert (scheduler.stats().preemptions > 0) == (num_blocks == 6)
    assert found[100] == found[6]
