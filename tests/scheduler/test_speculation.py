"""Drafts in plans, and what a result makes of them. Hand-built results; the drafter does what the test says."""

from dataclasses import replace
from math import inf

import pytest

from scheduler.config import MAX_STEP_DRAFTS
from scheduler.plan import FAILED_TOKEN, RowLogprobs, floats, ints
from scheduler.request import FinishReason, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.speculation import FIXED_ROWS, Proposal, choose_drafts, verify
from tests.scheduler.driving import NGRAM, answer, ask, make, run, sizes, step, with_config


class Stub:
    """Proposes the same tokens for every text."""

    def __init__(self, tokens: list[int], rate: float = 1.0) -> None:
        self.proposal = Proposal(ints(tokens), rate)
        self.finished: list[int] = []

    def propose(self, seq: Sequence) -> Proposal:
        return self.proposal

    def finish(self, seq: Sequence) -> None:
        self.finished.append(seq.request.seq_id)


def _started(drafter: Stub, sampling: SamplingParams | None = None, num_prompt: int = 5) -> Scheduler:
    """One sequence with its first token, 7."""
    scheduler = make(drafter=drafter)
    scheduler.add(ask(0, list(range(10, 10 + num_prompt)), sampling=sampling), 0.0)
    step(scheduler, tokens=[7])
    scheduler.take_events()
    return scheduler


@pytest.mark.parametrize(
    ("sampled", "drafts", "accepted"),
    [([5], [], 0), ([5, 6], [4], 0), ([4, 6], [4], 1), ([4, 5, 6], [4, 6], 1), ([4, 5, 6], [4, 5], 2)],
)
def test_drafts_hold_up_to_the_first_that_differs(sampled: list[int], drafts: list[int], accepted: int) -> None:
    assert verify(sampled, drafts) == accepted
    assert verify([FAILED_TOKEN, *sampled], [FAILED_TOKEN + 2, *drafts]) == 0


def test_plan_computes_and_samples_the_newest_token_and_its_drafts() -> None:
    plan = step(_started(Stub([1, 2, 3])), tokens=[9, 9, 9, 9])
    assert (plan.token_ids.tolist(), plan.query_lens.tolist(), plan.kv_lens.tolist()) == ([7, 1, 2, 3], [4], [9])
    assert len(plan.block_tables) == 3
    assert (plan.sample.rows.tolist(), plan.sample.counter.tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("sampled", "output"),
    [([5, 5, 5], [5]), ([1, 5, 5], [1, 5]), ([1, 2, 5], [1, 2, 5]), ([5, 2, 5], [5]), ([1, 3, 5], [1, 3])],
)
def test_accepted_drafts_and_one_token_become_output(sampled: list[int], output: list[int]) -> None:
    scheduler = _started(Stub([1, 2]))
    step(scheduler, tokens=sampled)
    [event] = scheduler.take_events()
    assert (list(event.token_ids), event.num_drafts, event.finish_reason) == (output, 2, None)
    following = step(scheduler, tokens=[0, 0, 0])
    assert following.token_ids.tolist() == [output[-1], 1, 2]
    assert following.kv_lens.tolist() == [5 + 1 + len(output) + 2]
    speculation = scheduler.stats().speculation
    assert (speculation.drafts, speculation.draft_tokens) == (2, 4)
    assert speculation.accepted_per_position == (1,) * (len(output) - 1)


def test_logprobs_come_from_the_rows_of_their_tokens() -> None:
    scheduler = _started(Stub([1, 2]), SamplingParams(max_tokens=100, logprobs=0))
    plan = scheduler.plan(0.0)
    assert plan is not None
    sampled = RowLogprobs(chosen=floats([-1.0, -2.0, -3.0]), ranks=ints([1] * 3), top_offsets=ints([0] * 4))
    scheduler.commit(replace(answer(plan, [1, 9, 9]), sampled=sampled), 0.0)
    [event] = scheduler.take_events()
    assert [logprob.value for logprob in event.logprobs] == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("sampling", "output", "reason", "stop_token"),
    [
        (SamplingParams(max_tokens=100, eos_token_ids=(2,)), [1, 2], FinishReason.STOP, None),
        (SamplingParams(max_tokens=100, stop_token_ids=(1,)), [1], FinishReason.STOP, 1),
        (SamplingParams(max_tokens=100, stop_token_ids=(6,)), [1, 2, 3, 6], FinishReason.STOP, 6),
    ],
)
def test_end_within_accepted_drafts_cuts_the_event(
    sampling: SamplingParams, output: list[int], reason: FinishReason, stop_token: int | None
) -> None:
    scheduler = _started(Stub([1, 2, 3]), sampling)
    step(scheduler, tokens=[1, 2, 3, 6])
    [event] = scheduler.take_events()
    assert (list(event.token_ids), event.finish_reason, event.stop_token_id) == (output, reason, stop_token)
    assert not scheduler.has_work()
    assert scheduler.stats().generation_tokens == 1 + len(output)


def test_no_draft_is_computed_behind_the_last_token() -> None:
    scheduler = _started(Stub([1, 2, 3, 4, 5]), SamplingParams(max_tokens=4))
    assert sizes(step(scheduler, tokens=[1, 2, 3])) == [3]  # the newest token and two drafts give tokens 2, 3 and 4
    [event] = scheduler.take_events()
    assert (event.token_ids, event.finish_reason) == ((1, 2, 3), FinishReason.LENGTH)
    assert sizes(step(_started(Stub([1]), SamplingParams(max_tokens=2)))) == [1]


def test_end_of_the_model_is_the_end_of_drafts() -> None:
    scheduler = make(max_model_len=8, drafter=Stub([1, 2, 3, 4]))
    scheduler.add(ask(0, 5), 0.0)
    assert [sizes(step(scheduler, tokens=tokens)) for tokens in ([7], [1, 2])] == [[5], [2]]
    assert scheduler.take_events()[-1].finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize(("sampled", "before"), [([FAILED_TOKEN, 1, 2], ()), ([1, FAILED_TOKEN, 2], (1,))])
def test_failed_row_ends_the_sequence_after_what_came_before_it(sampled: list[int], before: tuple[int, ...]) -> None:
    scheduler = _started(Stub([1, 2]))
    step(scheduler, tokens=sampled)
    *events, last = scheduler.take_events()
    assert [event.token_ids for event in events] == ([before] if before else [])
    assert (last.token_ids, last.finish_reason) == ((), FinishReason.ERROR)
    assert not scheduler.has_work()
    scheduler.check_invariants()


def test_failed_row_behind_a_rejected_draft_is_nothing() -> None:
    scheduler = _started(Stub([1, 2]))
    step(scheduler, tokens=[5, FAILED_TOKEN, FAILED_TOKEN])
    assert [event.token_ids for event in scheduler.take_events()] == [(5,)]
    assert scheduler.has_work()


def test_blocks_of_rejected_drafts_are_given_back() -> None:
    scheduler = _started(Stub([1, 2, 3, 4, 5, 6]), num_prompt=7)
    used = scheduler.stats().total_blocks - scheduler.stats().free_blocks
    plan = step(scheduler, tokens=[5] * 7)
    assert len(plan.block_tables) == used + 2
    stats = scheduler.stats()
    assert stats.total_blocks - stats.free_blocks - stats.cached_blocks == 3  # 9 tokens in blocks of 4


def test_drafts_take_only_blocks_that_are_there_and_preempt_nobody() -> None:
    scheduler = make(num_blocks=5, drafter=Stub([1] * 9))
    for seq_id in (0, 1):
        scheduler.add(ask(seq_id, 6), 0.0)
    step(scheduler)
    plan = step(scheduler, tokens=9)
    assert sizes(plan) == [6, 2]  # 7 + 5 tokens in the last free block's three, 8 in two blocks
    assert scheduler.stats().preemptions == 0


def test_drafts_fit_into_the_step_behind_prompts() -> None:
    scheduler = make(config=with_config(max_num_batched_tokens=20, prefill_share=0.5), drafter=Stub([1] * 32))
    scheduler.add(ask(0, 5), 0.0)
    step(scheduler)
    scheduler.add(ask(1, 30), 0.0)
    assert sizes(step(scheduler, tokens=5)) == [10, 10]


def test_drafts_of_all_sequences_are_bounded() -> None:
    config = with_config(max_num_batched_tokens=1000, max_num_seqs=8)
    scheduler = make(num_blocks=1000, config=config, drafter=Stub([1] * 32))
    for seq_id in range(8):
        scheduler.add(ask(seq_id, 5), 0.0)
    step(scheduler)
    plan = step(scheduler, tokens=5)
    assert len(plan.sample.rows) == 8 + MAX_STEP_DRAFTS
    speculative = with_config(max_num_seqs=8)
    assert speculative.max_sampled_rows == 8
    assert replace(speculative, speculative_config=NGRAM).max_sampled_rows == 8 + MAX_STEP_DRAFTS


def test_rows_of_drafts_are_sampled_as_if_the_drafts_were_output() -> None:
    """Penalties, bad words and min_tokens of a row count the drafts before it."""
    sampling = SamplingParams(
        max_tokens=100,
        min_tokens=3,
        stop_token_ids=(40,),
        bad_words=((1, 2, 50), (7, 60), (2, 70)),
        presence_penalty=0.5,
    )
    sample = step(_started(Stub([1, 2]), sampling, num_prompt=2), tokens=[0, 0, 0]).sample
    history = sample.history_ids.tolist()
    assert history == [10, 11, 7, 10, 11, 7, 1, 10, 11, 7, 1, 2]
    assert (sample.history_offsets.tolist(), sample.history_output_starts.tolist()) == ([0, 3, 7, 12], [2, 2, 2])
    assert (sample.bias_offsets.tolist(), sample.bias_ids.tolist()) == ([0, 2, 3, 5], [40, 60, 40, 50, 70])
    assert set(sample.bias_values) == {-inf}
    assert sample.presence_penalty.tolist() == [0.5] * 3


def _sequence(num_outputs: int = 1) -> Sequence:
    request = replace(ask(0, 3, max_tokens=997), output_ids=ints(list(range(num_outputs))))
    return Sequence(request=request, arrival=0, deadline=0.0, longest=1000)


@pytest.mark.parametrize(
    ("rate", "num_rows", "expected"),
    [(1.0, 1, 4), (0.5, 1, 2), (0.1, 1, 0), (0.2, 1, 1), (0.8, 64, 0), (0.95, 64, 2), (1.0, 64, 4)],
)
def test_drafts_are_as_many_as_are_worth_their_rows(rate: float, num_rows: int, expected: int) -> None:
    """One sequence and a right guess in two: the second draft is a token in four, worth its tenth of a step."""
    assert FIXED_ROWS == 8
    [drafts] = choose_drafts(Stub([5, 6, 7, 8], rate), [_sequence()], num_rows, room=100, fixed_rows=8)
    assert drafts.tolist() == [5, 6, 7, 8][:expected]


def test_drafter_hears_of_every_end() -> None:
    drafter = Stub([])
    scheduler = make(drafter=drafter)
    for seq_id in (0, 1):
        scheduler.add(ask(seq_id, 5, max_tokens=2), 0.0)
    scheduler.abort(1)
    run(scheduler)
    assert drafter.finished == [1, 0]
