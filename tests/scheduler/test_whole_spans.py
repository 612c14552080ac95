"""Models whose images attend in both directions: no step ends inside a span."""

from dataclasses import replace

import pytest

from scheduler import policy
from scheduler.plan import StepPlan
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.simulated_requests import Part
from tests.scheduler.driving import ENCODER, ask, encoded, make, picture, run, show, sizes, spans, step, with_config

WHOLE = replace(ENCODER, cache_bytes=2000, whole_spans=True)
A, B = picture("A", 12), picture("B", 12)


def _make(max_num_batched_tokens: int = 20, **changes: int | float | bool) -> Scheduler:
    return make(encoder=WHOLE, config=with_config(max_num_batched_tokens=max_num_batched_tokens, **changes))


def _whole(plan: StepPlan) -> bool:
    return all(first + length == end - start for _, length, _, first, start, end in spans(plan))


def test_chunk_that_would_end_inside_a_span_ends_before_it() -> None:
    scheduler = _make()
    scheduler.add(show(0, [*range(10), A, *range(10), B, 1], max_tokens=1), 0.0)
    plans = run(scheduler)[0]
    assert [sizes(plan) for plan in plans] == [[10], [20], [15]]  # of 10 + 12 + 10 + 12 + 1
    assert [encoded(plan) for plan in plans] == ["A", "", "B"]
    assert all(map(_whole, plans))


def test_span_at_the_head_exceeds_the_share() -> None:
    scheduler = _make(prefill_share=0.25)
    scheduler.add(ask(0, 3), 0.0)
    step(scheduler)
    scheduler.add(show(1, [1, A, 2, 3, 4, 5, 6], max_tokens=1), 0.0)
    assert [sizes(step(scheduler)) for _ in range(4)] == [[1, 1], [1, 12], [1, 5], [1]]


def test_prefix_hit_inside_a_span_leaves_its_rest_for_one_chunk() -> None:
    scheduler = _make(max_num_batched_tokens=8 + 12)
    scheduler.add(show(0, [1, A, 2], max_tokens=1), 0.0)
    step(scheduler)
    scheduler.add(show(1, [1, A, 3], max_tokens=1), 0.0)
    plan = step(scheduler)
    assert (spans(plan), sizes(plan)) == ([(0, 1, 0, 11, 1, 13)], [2])  # 12 of 14 tokens are a hit


def test_one_other_may_exceed_the_share_beside_the_oldest_within_the_step() -> None:
    scheduler = _make(max_num_batched_tokens=40, prefill_share=0.5)
    scheduler.add(ask(0, 3), 0.0)
    step(scheduler)
    scheduler.add(ask(1, 100, max_tokens=1), 0.0)
    scheduler.add(show(2, [A, 1], max_tokens=1), 0.0)
    scheduler.add(show(3, [B, 1], max_tokens=1), 0.0)
    # The share is 20, of which 10 are the oldest's; A takes 12 for 10. Then nothing is left for B.
    assert [sizes(step(scheduler)) for _ in range(3)] == [[1, 12, 10], [1, 1, 12, 10], [1, 1, 20]]


def _seq(parts: list[Part], seq_id: int, num_computed: int = 0) -> Sequence:
    request: Request = show(seq_id, parts)
    end = max((span.end for span in request.images.spans), default=0)
    return Sequence(
        request=request, arrival=seq_id, deadline=0.0, longest=1000, num_computed=num_computed, image_end=end
    )


@pytest.mark.parametrize(
    ("share", "limit", "expected"),
    [
        (26, 100, {0: 13, 1: 13}),
        (24, 100, {0: 12, 1: 12}),
        (23, 100, {0: 12, 1: 12}),
        (23, 23, {0: 23}),
        (5, 24, {0: 12}),
        (1, 12, {0: 12}),
    ],
)
def test_the_oldest_always_gets_its_span(share: int, limit: int, expected: dict[int, int]) -> None:
    oldest, other = _seq([A, *range(30)], 0), _seq([B, 1], 1)
    prompts = [(seq, seq.remaining) for seq in (oldest, other)]
    chunks = policy.split_share(prompts, share, limit, whole_spans=True)
    assert {seq.arrival: tokens for seq, tokens in chunks} == expected


def test_span_that_no_step_can_hold_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="a span of 12 tokens in a step that holds 11"):
        policy.split_share([(_seq([A, 1], 0), 13)], 11, 11, whole_spans=True)
