"""The step that gives memory back: what nobody uses goes, what somebody uses stays."""

from dataclasses import replace

from tests.scheduler.driving import ENCODER, A, B, answer, encoded, make, run, show, step


def test_relief_leaves_what_is_used() -> None:
    """Sequence 1 goes on with its blocks and its image; what 0 left is gone, and 2 computes it again."""
    scheduler = make(encoder=replace(ENCODER, cache_bytes=160))
    scheduler.add(show(0, [A, 1, 2, 3], max_tokens=1), 0.0)
    first = step(scheduler)
    scheduler.add(show(1, [5, 6, B, 7], max_tokens=3), 0.0)
    second = step(scheduler)
    stats = scheduler.stats()
    assert stats.cached_blocks > 0

    plan = scheduler.plan_relief()
    scheduler.check_invariants()
    scheduler.commit(answer(plan), 0.0)
    scheduler.check_invariants()
    assert (plan.step_id, list(plan.token_ids), list(plan.query_lens)) == (second.step_id + 1, [], [])
    used = set(second.block_tables)
    assert sorted([*plan.free_blocks, *used]) == list(range(stats.total_blocks))
    assert set(first.encode.slots) <= set(plan.drop_slots)
    assert scheduler.stats().cached_blocks == 0

    scheduler.add(show(2, [A, 1, 2, 3], max_tokens=1), 0.0)
    plans, events = run(scheduler)
    assert {event.seq_id: event.cached_tokens for event in events if event.seq_id == 2} == {2: 0}
    assert [encoded(plan) for plan in plans if encoded(plan)] == ["A"]
    assert plans[0].block_tables[: len(used)].tolist() == second.block_tables.tolist()


def test_relief_of_an_empty_scheduler_frees_all() -> None:
    scheduler = make()
    plan = scheduler.plan_relief()
    scheduler.commit(answer(plan), 0.0)
    assert sorted(plan.free_blocks) == list(range(scheduler.stats().total_blocks))
    assert scheduler.plan(0.0) is None
