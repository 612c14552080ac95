"""The life of a sequence: steps, ends, refusals, deadlines, aborts, failures. Driven by hand-built results."""

from dataclasses import replace

import pytest

from scheduler.plan import FAILED_TOKEN, StepResult, ints
from scheduler.request import FinishReason, NeverFits, QueueFull, SamplingParams
from scheduler.scheduler import Scheduler
from tests.scheduler.driving import answer, ask, make, outputs, run, sizes, step, with_config


def test_first_plan_says_everything() -> None:
    scheduler = make()
    scheduler.add(ask(1, [11, 12, 13, 14, 15]), 0.0)
    plan = step(scheduler, tokens=[42])
    assert (plan.step_id, plan.token_ids.tolist()) == (1, [11, 12, 13, 14, 15])
    assert (plan.query_lens.tolist(), plan.kv_lens.tolist()) == ([5], [5])
    assert len(plan.block_tables) == 2
    assert (plan.sample.rows.tolist(), plan.sample.counter.tolist()) == ([4], [0])
    following = step(scheduler)
    assert (following.step_id, following.token_ids.tolist()) == (2, [42])
    assert (following.kv_lens.tolist(), following.sample.counter.tolist()) == ([6], [1])
    assert following.block_tables == plan.block_tables


def test_nothing_to_do_is_no_plan() -> None:
    scheduler = make()
    assert not scheduler.has_work()
    assert scheduler.plan(0.0) is None


def test_decodes_come_first_and_prompts_keep_to_their_share() -> None:
    scheduler = make()
    scheduler.add(ask(0, 5), 0.0)
    scheduler.add(ask(1, 5), 0.0)
    step(scheduler)
    scheduler.add(ask(2, 50), 0.0)
    plans = [step(scheduler) for _ in range(4)]
    assert [sizes(plan) for plan in plans] == [[1, 1, 16], [1, 1, 16], [1, 1, 16], [1, 1, 2]]
    assert [len(plan.sample.rows) for plan in plans] == [2, 2, 2, 3]
    assert sizes(step(scheduler)) == [1, 1, 1]


def test_prompt_alone_takes_the_whole_budget() -> None:
    scheduler = make()
    scheduler.add(ask(0, 150), 0.0)
    assert [sizes(step(scheduler)) for _ in range(4)] == [[64], [64], [22], [1]]


def test_running_streams_are_not_delayed_by_a_long_prompt() -> None:
    scheduler = make(num_blocks=1000)
    scheduler.add(ask(0, 5, max_tokens=30), 0.0)
    step(scheduler)
    scheduler.add(ask(1, 900), 0.0)
    for _ in range(29):
        plan = step(scheduler)
        assert sizes(plan)[0] == 1
        assert sum(sizes(plan)[1:]) == 16
    assert scheduler.take_events()[-1].finish_reason == FinishReason.LENGTH


def test_share_is_at_least_one_token() -> None:
    scheduler = make(config=with_config(prefill_share=0.001))
    scheduler.add(ask(0, 3), 0.0)
    step(scheduler)
    scheduler.add(ask(1, 3), 0.0)
    assert [sizes(step(scheduler)) for _ in range(3)] == [[1, 1], [1, 1], [1, 1]]
    assert len(outputs(scheduler.take_events())[1]) == 1


def test_seats_are_bounded() -> None:
    scheduler = make(config=with_config(max_num_seqs=2))
    for seq_id in range(3):
        scheduler.add(ask(seq_id, 5, max_tokens=2), 0.0)
    assert sizes(step(scheduler)) == [5, 5]
    assert (scheduler.stats().running, scheduler.stats().waiting) == (2, 1)
    run(scheduler)
    assert (scheduler.stats().running, scheduler.stats().waiting) == (0, 0)


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "stop_token"),
    [
        (SamplingParams(max_tokens=3), [5, 6, 7], FinishReason.LENGTH, None),
        (SamplingParams(max_tokens=9, eos_token_ids=(2,)), [5, 2], FinishReason.STOP, None),
        (SamplingParams(max_tokens=9, stop_token_ids=(2, 3)), [5, 3], FinishReason.STOP, 3),
        (SamplingParams(max_tokens=9, eos_token_ids=(2,), stop_token_ids=(2,)), [2], FinishReason.STOP, None),
        (SamplingParams(max_tokens=2, eos_token_ids=(2,)), [5, 2], FinishReason.STOP, None),
    ],
)
def test_ends(sampling: SamplingParams, tokens: list[int], reason: FinishReason, stop_token: int | None) -> None:
    scheduler = make()
    scheduler.add(ask(4, sampling=sampling), 0.0)
    for token in tokens:
        step(scheduler, tokens=[token])
    events = scheduler.take_events()
    assert [event.token_ids for event in events] == [(token,) for token in tokens]
    assert [event.finish_reason for event in events] == [None] * (len(tokens) - 1) + [reason]
    assert events[-1].stop_token_id == stop_token
    assert not scheduler.has_work()


def test_ends_at_the_models_length_and_at_the_pools() -> None:
    for num_blocks, max_model_len, total in ((100, 12, 12), (2, 1000, 8)):
        scheduler = make(num_blocks=num_blocks, max_model_len=max_model_len)
        scheduler.add(ask(0, 5, max_tokens=65535), 0.0)
        _, events = run(scheduler)
        assert len(events) == total - 5
        assert events[-1].finish_reason == FinishReason.LENGTH


def test_what_never_fits_is_refused_with_both_numbers() -> None:
    with pytest.raises(NeverFits, match=r"needs 21 tokens.*at most 20") as too_long:
        make(max_model_len=20).add(ask(0, 20), 0.0)
    assert (too_long.value.needed, too_long.value.limit) == (21, 20)
    with pytest.raises(NeverFits, match=r"needs 4 KV blocks.*at most 3"):
        make(num_blocks=3).add(ask(0, 12), 0.0)
    with pytest.raises(NeverFits, match=r"needs 11 queued prompt tokens.*at most 10"):
        make(config=with_config(max_queued_tokens=10)).add(ask(0, 11), 0.0)
    for scheduler in (make(max_model_len=20), make(num_blocks=5)):
        scheduler.add(ask(0, 19), 0.0)  # one below is accepted, whatever max_tokens says
        run(scheduler)


def test_queue_is_bounded_in_sequences_and_tokens() -> None:
    scheduler = make(config=with_config(max_num_seqs=1, max_queued_requests=1, max_queued_tokens=20))
    scheduler.add(ask(0, 5), 0.0)
    with pytest.raises(QueueFull, match="16 more would exceed the limit of 20"):
        scheduler.add(ask(1, 16), 0.0)
    scheduler.add(ask(1, 15), 0.0)
    with pytest.raises(QueueFull, match="2 sequences"):
        scheduler.add(ask(2, 1), 0.0)
    scheduler.check_invariants()
    scheduler.abort(1)
    scheduler.add(ask(2, 15), 0.0)
    assert scheduler.stats().waiting == 2


def test_a_replay_goes_on_behind_its_outputs() -> None:
    """Parameters that count outputs count those too; what was said of the prompt is not said again."""
    scheduler = make()
    sampling = SamplingParams(
        max_tokens=4, min_tokens=3, eos_token_ids=(9,), bad_words=((5, 6),), frequency_penalty=1.0, prompt_logprobs=0
    )
    scheduler.add(replace(ask(1, [1, 2, 3], sampling=sampling), output_ids=ints([4, 5])), 0.0)
    plan = step(scheduler, tokens=[8])
    assert (plan.token_ids.tolist(), plan.query_lens.tolist()) == ([1, 2, 3, 4, 5], [5])
    sample = plan.sample
    assert (sample.counter.tolist(), sample.history_ids.tolist()) == ([2], [1, 2, 3, 4, 5])
    assert sample.history_output_starts.tolist() == [3]
    assert sample.bias_ids.tolist() == [9, 6], "no end before min_tokens, no end of the bad word"
    assert len(plan.score.rows) == 0
    step(scheduler, tokens=[7])
    first, last = scheduler.take_events()
    assert (first.token_ids, first.prompt_logprobs, first.cached_tokens) == ((8,), (), 0)
    assert (last.token_ids, last.finish_reason) == ((7,), FinishReason.LENGTH)
    assert (scheduler.stats().prompt_tokens, scheduler.stats().generation_tokens) == (0, 2)


def test_a_replay_that_no_longer_fits_is_refused() -> None:
    """The next engine may have found less memory."""
    scheduler = make(num_blocks=2)
    with pytest.raises(NeverFits, match=r"needs 3 KV blocks, and at most 2"):
        scheduler.add(replace(ask(1, 5), output_ids=ints([1, 2, 3])), 0.0)
    scheduler.add(replace(ask(1, 5), output_ids=ints([1, 2])), 0.0)
    with pytest.raises(AssertionError, match="sequence 2 has had all its tokens"):
        scheduler.add(replace(ask(2, 5, max_tokens=2), output_ids=ints([1, 2])), 0.0)


def test_duplicate_id_is_a_broken_invariant() -> None:
    scheduler = make()
    scheduler.add(ask(0), 0.0)
    with pytest.raises(AssertionError, match="live already"):
        scheduler.add(ask(0), 0.0)


def _reasons(scheduler: Scheduler) -> list[tuple[int, FinishReason | None]]:
    return [(event.seq_id, event.finish_reason) for event in scheduler.take_events()]


def test_deadlines_of_waiting_and_running_sequences() -> None:
    scheduler = make(config=with_config(max_num_seqs=1, request_timeout=50.0))
    scheduler.add(ask(0, deadline=10.0), 0.0)
    scheduler.add(ask(1, deadline=5.0), 0.0)
    scheduler.add(ask(2), 0.0)  # none given: the configured time-out
    step(scheduler, now=4.9)
    assert _reasons(scheduler) == [(0, None)]
    step(scheduler, now=5.0)
    assert _reasons(scheduler) == [(1, FinishReason.TIMEOUT), (0, None)]
    step(scheduler, now=10.0)  # ends 0 before planning, so that 2 runs
    assert _reasons(scheduler) == [(0, FinishReason.TIMEOUT), (2, None)]
    assert scheduler.plan(50.0) is None
    (event,) = scheduler.take_events()
    assert event.finish_reason == FinishReason.TIMEOUT
    assert event.message == "the request's deadline passed after 1 output tokens"
    assert scheduler.stats().free_blocks + scheduler.stats().cached_blocks == 100


def test_deadline_that_passes_during_a_step_ends_the_sequence_after_its_token() -> None:
    scheduler = make()
    scheduler.add(ask(0, deadline=5.0), 0.0)
    plan = scheduler.plan(4.0)
    assert plan is not None
    scheduler.commit(answer(plan), 6.0)
    assert _reasons(scheduler) == [(0, None), (0, FinishReason.TIMEOUT)]


def test_abort_in_queue_in_prompt_in_decode_and_between_plan_and_commit() -> None:
    scheduler = make(config=with_config(max_num_seqs=3))
    scheduler.add(ask(0, 5), 0.0)
    step(scheduler)
    for seq_id, length in ((1, 100), (2, 30), (3, 5)):
        scheduler.add(ask(seq_id, length), 0.0)
    step(scheduler)
    scheduler.take_events()
    assert (scheduler.stats().running, scheduler.stats().waiting) == (3, 1)
    plan = scheduler.plan(0.0)
    assert plan is not None
    for seq_id in (3, 1, 0):  # waiting, prompt, decode
        assert scheduler.abort(seq_id)
        assert not scheduler.abort(seq_id)
        scheduler.check_invariants()
    scheduler.commit(answer(plan), 0.0)
    assert _reasons(scheduler) == [(seq_id, FinishReason.ABORT) for seq_id in (3, 1, 0)]
    assert (scheduler.stats().running, scheduler.stats().waiting) == (1, 0)
    assert not scheduler.abort(99)
    assert len(outputs(run(scheduler)[1])[2]) == 100


def test_aborted_id_may_come_again_before_the_commit() -> None:
    scheduler = make()
    scheduler.add(ask(0, 5), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.abort(0)
    scheduler.add(ask(0, 5, max_tokens=1), 0.0)
    scheduler.commit(answer(plan), 0.0)
    assert _reasons(scheduler) == [(0, FinishReason.ABORT)]
    step(scheduler)
    assert _reasons(scheduler) == [(0, FinishReason.LENGTH)]


def test_failed_row_ends_its_sequence_only() -> None:
    scheduler = make()
    for seq_id in range(3):
        scheduler.add(ask(seq_id, 5), 0.0)
    step(scheduler, tokens=[7, FAILED_TOKEN, 8])
    events = scheduler.take_events()
    assert [(event.seq_id, event.token_ids) for event in events] == [(0, (7,)), (1, ()), (2, (8,))]
    assert events[1].finish_reason == FinishReason.ERROR
    assert events[1].message == "the model's output was not finite"
    assert sizes(step(scheduler)) == [1, 1]


def test_results_that_do_not_fit_the_plan_are_refused() -> None:
    scheduler = make()
    scheduler.add(ask(0), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    with pytest.raises(AssertionError, match="planned and not committed"):
        scheduler.plan(0.0)
    right = answer(plan)
    with pytest.raises(AssertionError, match="result of step 2, planned was 1"):
        scheduler.commit(StepResult(step_id=2, token_ids=ints(), sampled=right.sampled, scored=right.scored), 0.0)
    scheduler.commit(right, 0.0)
    with pytest.raises(AssertionError, match="without a plan"):
        scheduler.commit(right, 0.0)


def test_counters_never_fall_and_add_up() -> None:
    scheduler = make(num_blocks=12, config=with_config(max_num_seqs=4))
    for seq_id in range(8):
        scheduler.add(ask(seq_id, [1, 2, 3, 4, 5, 6, 7, 8, seq_id], max_tokens=12), 0.0)
    before = scheduler.stats()
    while scheduler.has_work():
        step(scheduler)
        stats = scheduler.stats()
        for name in ("preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens"):
            assert getattr(stats, name) >= getattr(before, name)
        before = stats
    assert (before.prompt_tokens, before.generation_tokens, before.prefix_queries) == (72, 96, 72)
    assert before.preemptions > 0
    assert before.prefix_hits == 7 * 8
