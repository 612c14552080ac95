"""Who goes first, who waits for whom, who is preempted; and that nobody waits for ever."""

import pytest

from scheduler import policy
from scheduler.request import FinishReason, SamplingParams, TokenEvent
from tests.scheduler.driving import ask, make, outputs, run, sizes, step, with_config


def _order_of_first_tokens(events: list[TokenEvent]) -> list[int]:
    return list(dict.fromkeys(event.seq_id for event in events if event.token_ids))


def test_queue_is_ordered_by_priority_then_arrival() -> None:
    scheduler = make(config=with_config(max_num_seqs=1))
    for seq_id, priority in ((0, 0), (1, 5), (2, 0), (3, -1), (4, 5)):
        scheduler.add(ask(seq_id, priority=priority, max_tokens=1), 0.0)
    _, events = run(scheduler)
    assert _order_of_first_tokens(events) == [3, 0, 2, 1, 4]


def test_better_priority_does_not_preempt_by_arriving() -> None:
    scheduler = make(config=with_config(max_num_seqs=1))
    scheduler.add(ask(0, priority=5, max_tokens=3), 0.0)
    step(scheduler)
    scheduler.add(ask(1, priority=0, max_tokens=1), 0.0)
    _, events = run(scheduler)
    assert [event.seq_id for event in events] == [0, 0, 0, 1]
    assert scheduler.stats().preemptions == 0


def test_share_goes_to_short_prompts_but_half_of_it_to_the_oldest() -> None:
    scheduler = make(num_blocks=500)
    scheduler.add(ask(0, 3), 0.0)
    step(scheduler)
    scheduler.add(ask(1, 400), 0.0)
    step(scheduler)
    for seq_id in (2, 3, 4):
        scheduler.add(ask(seq_id, 5), 0.0)
    plan = step(scheduler)
    # 16 tokens: 8 kept for the long one, the others in order of arrival.
    assert sizes(plan) == [1, 5, 3, 8]
    assert sizes(step(scheduler)) == [1, 1, 2, 5, 9]


def test_equal_prompts_are_computed_one_after_the_other() -> None:
    scheduler = make()
    for seq_id in range(3):
        scheduler.add(ask(seq_id, 60), 0.0)
    assert sizes(step(scheduler)) == [60, 4]
    assert sizes(step(scheduler)) == [1, 16]


def test_preempts_lowest_priority_then_youngest_and_keeps_its_outputs() -> None:
    scheduler = make(num_blocks=7, config=with_config(enable_prefix_caching=False))
    for seq_id, priority in ((0, 1), (1, 0), (2, 0)):
        scheduler.add(ask(seq_id, 4, priority=priority, max_tokens=8), 0.0)
    # Two blocks each; at nine tokens each needs a third one: 1 gets it, for 2 the last in rank has to go, 0.
    _, events = run(scheduler)
    assert scheduler.stats().preemptions == 1
    assert {seq_id: len(tokens) for seq_id, tokens in outputs(events).items()} == {0: 8, 1: 8, 2: 8}
    ended = [event.seq_id for event in events if event.finish_reason]
    assert ended == [1, 2, 0]


def test_preempted_sequence_is_first_of_its_priority() -> None:
    scheduler = make(num_blocks=4, config=with_config(max_num_seqs=2))
    scheduler.add(ask(0, 4, max_tokens=8), 0.0)
    scheduler.add(ask(1, 4, max_tokens=8), 0.0)
    scheduler.add(ask(2, 4, max_tokens=1), 0.0)
    events = []
    while not scheduler.stats().preemptions:
        step(scheduler)
    events = run(scheduler)[1]
    assert [event.seq_id for event in events if event.finish_reason] == [0, 1, 2]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_eight_requests_in_a_pool_for_two_all_finish(prefix_caching: bool) -> None:
    config = with_config(enable_prefix_caching=prefix_caching)
    scheduler = make(num_blocks=10, config=config)
    for seq_id in range(8):
        scheduler.add(ask(seq_id, 8, max_tokens=12), 0.0)  # 20 tokens: five blocks
    plans, events = run(scheduler, max_steps=300)
    assert {seq_id: len(tokens) for seq_id, tokens in outputs(events).items()} == dict.fromkeys(range(8), 12)
    # One after the other would take 8 x 12 steps; recomputing may not make it worse than that.
    assert len(plans) <= 96
    assert scheduler.stats().free_blocks + scheduler.stats().cached_blocks == 10


def test_two_sequences_that_each_want_the_whole_pool_finish_one_after_the_other() -> None:
    scheduler = make(num_blocks=8)
    for seq_id in range(2):
        scheduler.add(ask(seq_id, 4, max_tokens=1000), 0.0)
    _, events = run(scheduler, max_steps=100)
    assert {seq_id: len(tokens) for seq_id, tokens in outputs(events).items()} == {0: 28, 1: 28}
    assert [event.finish_reason for event in events if event.finish_reason] == [FinishReason.LENGTH] * 2


def test_followers_wait_for_their_leader_and_take_its_blocks() -> None:
    scheduler = make()
    prompt = list(range(100))
    for seq_id in range(4):
        scheduler.add(ask(seq_id, prompt, leader=0 if seq_id else None, max_tokens=2), 0.0)
    plans, events = run(scheduler)
    assert [sizes(plan) for plan in plans[:2]] == [[64], [36]]
    assert sizes(plans[2]) == [1, 4, 4, 4]  # 24 full blocks are shared; the last four tokens are computed
    cached = {event.seq_id: event.cached_tokens for event in events if event.cached_tokens}
    assert cached == {1: 96, 2: 96, 3: 96}
    assert sum(map(sum, map(sizes, plans))) == 100 + 3 * 4 + 4


@pytest.mark.parametrize("phase", ["queue", "prompt"])
def test_followers_survive_the_end_of_their_leader(phase: str) -> None:
    scheduler = make()
    for seq_id in range(3):
        scheduler.add(ask(seq_id, list(range(100)), leader=0 if seq_id else None, max_tokens=1), 0.0)
    if phase == "prompt":
        step(scheduler)
    scheduler.abort(0)
    _, events = run(scheduler)
    assert [(e.seq_id, e.finish_reason) for e in events] == [
        (0, FinishReason.ABORT),
        (1, FinishReason.LENGTH),
        (2, FinishReason.LENGTH),
    ]


def test_leaders_in_a_circle_do_not_hang() -> None:
    scheduler = make()
    scheduler.add(ask(0, list(range(20)), leader=1, max_tokens=1), 0.0)
    scheduler.add(ask(1, list(range(20)), leader=0, max_tokens=1), 0.0)
    scheduler.add(ask(2, list(range(20)), leader=2, max_tokens=1), 0.0)
    assert len(run(scheduler, max_steps=5)[1]) == 3


def test_sixteen_equal_system_prompts_are_computed_once() -> None:
    scheduler = make(num_blocks=400, config=with_config(max_num_seqs=16))
    system = list(range(200))
    for seq_id in range(16):
        scheduler.add(ask(seq_id, [*system, 1000 + seq_id, 2000], max_tokens=1), 0.0)
    plans, _ = run(scheduler)
    assert sum(map(sum, map(sizes, plans))) == 202 + 15 * 2


def test_only_the_shared_part_is_waited_for() -> None:
    scheduler = make(num_blocks=500)
    scheduler.add(ask(0, list(range(400)), max_tokens=1), 0.0)
    scheduler.add(ask(1, [*range(64), 999], max_tokens=1), 0.0)
    assert sizes(step(scheduler)) == [64]
    assert sizes(step(scheduler)) == [1, 63]  # 1 starts with 16 shared blocks while 0 goes on


def test_nobody_waits_for_a_prompt_of_lower_priority() -> None:
    scheduler = make(num_blocks=500)
    scheduler.add(ask(0, list(range(400)), priority=1, max_tokens=1), 0.0)
    step(scheduler)
    scheduler.add(ask(1, list(range(100)), priority=0, max_tokens=1), 0.0)
    plan = step(scheduler)
    assert sizes(plan) == [36, 28]
    assert plan.kv_lens.tolist() == [100, 92]


def test_light_requests_pass_a_heavy_one_that_finds_no_blocks() -> None:
    """One running, one that needs nearly the whole pool, and twenty light ones behind it."""
    scheduler = make(num_blocks=30)
    scheduler.add(ask(0, 8, max_tokens=60), 0.0)
    step(scheduler)
    scheduler.add(ask(1, 110, max_tokens=2), 0.0)
    for seq_id in range(2, 22):
        scheduler.add(ask(seq_id, 4, max_tokens=2), 0.0)
    events = []
    for _ in range(30):
        step(scheduler)
        events += scheduler.take_events()
    ended = [event.seq_id for event in events if event.finish_reason]
    assert ended == list(range(2, 22))
    rest = run(scheduler)[1]
    assert [event.seq_id for event in rest if event.finish_reason] == [0, 1]


def test_heavy_request_is_overtaken_a_bounded_number_of_times() -> None:
    scheduler = make(num_blocks=30)
    scheduler.add(ask(0, 8, max_tokens=2), 0.0)
    scheduler.add(ask(1, 8, max_tokens=2), 0.0)
    step(scheduler)
    scheduler.add(ask(2, 110, max_tokens=1), 0.0)
    ended: list[int] = []
    for seq_id in range(3, 400):  # an endless stream of light ones keeps the pool from ever being empty
        scheduler.add(ask(seq_id, 8, max_tokens=3), 0.0)
        step(scheduler)
        ended += [event.seq_id for event in scheduler.take_events() if event.finish_reason]
        if 2 in ended:
            break
    assert ended.index(2) == 2 + policy.MAX_OVERTAKES


def test_long_prompts_side_by_side_do_not_hold_up_short_ones() -> None:
    scheduler = make(num_blocks=2000)
    for seq_id in range(3):
        scheduler.add(ask(seq_id, 900, max_tokens=1), 0.0)
    step(scheduler)
    scheduler.add(ask(3, 20, max_tokens=1), 0.0)
    step(scheduler)
    assert [event.seq_id for event in scheduler.take_events()] == [3]


def test_prompt_of_a_preempted_sequence_is_scored_once() -> None:
    scheduler = make(num_blocks=16, config=with_config(max_num_batched_tokens=16, prefill_share=0.5))
    scheduler.add(ask(0, 4, max_tokens=40), 0.0)
    step(scheduler)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scheduler.add(ask(1, 45, sampling=sampling), 0.0)
    _, events = run(scheduler)
    (scored,) = [event for event in events if event.seq_id == 1]
    assert len(scored.prompt_logprobs) == 44


def test_admission_leaves_a_block_to_each_sequence_that_will_grow() -> None:
    for num_blocks, running in ((5, 2), (4, 1)):
        scheduler = make(num_blocks=num_blocks)
        scheduler.add(ask(0, 7, max_tokens=5), 0.0)  # two blocks, and a third one later
        scheduler.add(ask(1, 7, max_tokens=1), 0.0)  # two blocks for good
        step(scheduler, tokens=[7] * running)
        assert scheduler.stats().preemptions == 0
        assert len(scheduler.take_events()) == running


@pytest.mark.parametrize("num_heavy", [policy.MAX_BLOCKED - 1, policy.MAX_BLOCKED])
def test_a_bounded_number_of_blocked_requests_is_looked_past(num_heavy: int) -> None:
    scheduler = make(num_blocks=30)
    scheduler.add(ask(0, 8, max_tokens=60), 0.0)
    step(scheduler)
    for seq_id in range(1, num_heavy + 1):
        scheduler.add(ask(seq_id, 110), 0.0)
    scheduler.add(ask(99, 4), 0.0)
    assert len(step(scheduler).query_lens) == (2 if num_heavy < policy.MAX_BLOCKED else 1)
