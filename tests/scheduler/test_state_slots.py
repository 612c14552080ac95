"""Where states of texts are: own slots, checkpoints behind blocks, and hits that end at one. Blocks are of 4 tokens."""

from dataclasses import replace

import pytest

from scheduler.config import SchedulerConfig
from scheduler.plan import NO_STATE, StepPlan
from scheduler.scheduler import Scheduler
from scheduler.state_slots import MARK_TOKENS
from tests.scheduler.driving import CONFIG, answer, ask, run, step

FIRST = CONFIG.max_num_seqs
"""Slot of the first checkpoint."""
LONG = replace(CONFIG, max_num_batched_tokens=2000)


def make(config: SchedulerConfig = CONFIG, num_blocks: int = 1000) -> Scheduler:
    return Scheduler(config, num_blocks=num_blocks, max_model_len=4000, has_states=True)


def runs(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(one past the last row, slot read, slot written)."""
    return list(zip(plan.states.ends, plan.states.reads, plan.states.writes, strict=True))


def cached(scheduler: Scheduler, seq_id: int, prompt: list[int]) -> int:
    """Tokens of a prompt that were in the cache, of a sequence that runs to its end."""
    scheduler.add(ask(seq_id, prompt, max_tokens=2), 0.0)
    _, events = run(scheduler)
    return next(event.cached_tokens for event in events)


def test_a_prompt_leaves_a_checkpoint_behind_its_last_block_and_goes_on_in_its_own_slot() -> None:
    scheduler = make()
    scheduler.add(ask(1, 14), 0.0)
    assert runs(step(scheduler)) == [(12, NO_STATE, FIRST), (14, FIRST, 0)]
    scheduler.add(ask(2, 4), 0.0)  # a token must be left to compute, so its last block does not count
    assert runs(step(scheduler)) == [(1, 0, 0), (5, NO_STATE, 1)]


def test_a_chunk_that_ends_at_a_mark_leaves_the_newest_state_in_the_checkpoint() -> None:
    scheduler = make(replace(CONFIG, max_num_batched_tokens=8))
    scheduler.add(ask(1, 10), 0.0)
    assert runs(step(scheduler)) == [(8, NO_STATE, FIRST)]
    assert runs(step(scheduler)) == [(2, FIRST, 0)]
    assert runs(step(scheduler)) == [(1, 0, 0)]


def test_a_hit_ends_at_the_last_checkpoint() -> None:
    scheduler, text = make(), list(range(30))
    assert cached(scheduler, 1, text[:18]) == 0
    assert cached(scheduler, 2, text[:18]) == 16
    assert cached(scheduler, 3, text) == 16
    assert cached(scheduler, 4, text) == 28


def test_where_two_texts_part_the_second_leaves_a_checkpoint_for_the_third() -> None:
    scheduler, system = make(), list(range(24))
    assert cached(scheduler, 1, [*system, *range(100, 110)]) == 0
    assert cached(scheduler, 2, [*system, *range(200, 210)]) == 0
    assert cached(scheduler, 3, [*system, *range(300, 310)]) == 24


def test_a_long_text_leaves_checkpoints_all_along_its_output_too() -> None:
    scheduler = make(LONG)
    scheduler.add(ask(1, 1100, max_tokens=500), 0.0)
    plans, _ = run(scheduler)
    assert runs(plans[0]) == [
        (MARK_TOKENS, NO_STATE, FIRST),
        (2 * MARK_TOKENS, FIRST, FIRST + 1),
        (1096, FIRST + 1, FIRST + 2),
        (1100, FIRST + 2, 0),
    ]
    assert [runs(plan) for plan in plans[436:439]] == [[(1, 0, FIRST + 3)], [(1, FIRST + 3, 0)], [(1, 0, 0)]]


def test_choices_of_a_request_share_the_state_of_their_prompt() -> None:
    scheduler = make()
    for seq_id in (1, 2, 3):
        scheduler.add(ask(seq_id, list(range(11)), leader=1 if seq_id > 1 else None), 0.0)
    assert runs(step(scheduler)) == [(8, NO_STATE, FIRST), (11, FIRST, 0)]
    assert runs(step(scheduler)) == [(1, 0, 0), (4, FIRST, 1), (7, FIRST, 2)]


def test_the_checkpoint_that_was_used_longest_ago_makes_room() -> None:
    scheduler = make(replace(CONFIG, max_state_checkpoints=2))
    texts = [list(range(start, start + 10)) for start in (0, 100, 200)]
    assert [cached(scheduler, index, text) for index, text in enumerate([*texts[:2], texts[0], texts[2]])] == [
        0,
        0,
        8,
        0,
    ]
    assert [cached(scheduler, 10 + index, text) for index, text in enumerate([texts[0], texts[1]])] == [8, 0]


def test_a_checkpoint_goes_with_its_block() -> None:
    scheduler = make(num_blocks=8)
    text = list(range(10))
    assert [cached(scheduler, 1, text), cached(scheduler, 2, text)] == [0, 8]
    scheduler.add(ask(3, 31, max_tokens=1), 0.0)
    run(scheduler)
    assert cached(scheduler, 4, text) == 0


@pytest.mark.parametrize("changes", [{"max_state_checkpoints": 0}, {"enable_prefix_caching": False}])
def test_without_checkpoints_there_are_no_hits(changes: dict[str, int | bool]) -> None:
    scheduler, text = make(replace(CONFIG, **changes)), list(range(10))  # type: ignore[arg-type]
    scheduler.add(ask(1, text, max_tokens=1), 0.0)
    assert runs(step(scheduler)) == [(10, NO_STATE, 0)]
    assert cached(scheduler, 2, text) == 0


def test_a_state_is_not_served_from_a_sequence_that_failed() -> None:
    scheduler, text = make(), list(range(10))
    scheduler.add(ask(1, text), 0.0)
    step(scheduler)
    step(scheduler, tokens=-1)
    assert not scheduler.has_work()
    assert cached(scheduler, 2, text) == 0


def test_a_state_that_failed_is_not_served_from_behind_the_block_of_another() -> None:
    """The first two texts part behind 24 tokens, where the second one leaves a state for the first one's block."""
    scheduler, system = make(), list(range(24))
    assert cached(scheduler, 1, [*system, *range(100, 110)]) == 0
    scheduler.add(ask(2, [*system, *range(200, 210)]), 0.0)
    step(scheduler)
    step(scheduler, tokens=-1)
    assert not scheduler.has_work()
    scheduler.take_events()
    assert cached(scheduler, 3, [*system, *range(300, 310)]) == 0
    assert cached(scheduler, 4, [*system, *range(400, 410)]) == 24


def test_a_preempted_sequence_goes_on_from_its_checkpoint_if_its_blocks_are_there() -> None:
    scheduler = make(num_blocks=9)
    scheduler.add(ask(1, 17), 0.0)
    scheduler.add(ask(2, 10), 0.0)
    plans, _ = run(scheduler)
    assert scheduler.stats().preemptions > 0
    again = [plan for plan in plans[1:] if max(plan.query_lens) > 1]
    assert [read for plan in again for read in plan.states.reads if read >= FIRST] != []


def test_relief_forgets_checkpoints_that_nobody_uses() -> None:
    """Of a sequence that runs the own slot stays, and the checkpoint of its prompt, whose block it has."""
    scheduler, text = make(replace(CONFIG, max_num_seqs=2, max_state_checkpoints=3)), list(range(10))
    assert cached(scheduler, 1, text) == 0
    scheduler.add(ask(2, list(range(50, 60))), 0.0)
    step(scheduler)
    plan = scheduler.plan_relief()
    scheduler.commit(answer(plan), 0.0)
    scheduler.check_invariants()
    assert sorted(plan.free_states) == [1, 2, 4]
    scheduler.abort(2)
    scheduler.take_events()
    assert cached(scheduler, 3, list(range(50, 60))) == 8
    assert cached(scheduler, 4, text) == 0
