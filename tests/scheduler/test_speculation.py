"""Drafts in plans, and what a result makes of them. Hand-built results; the drafter does what the test says."""

from dataclasses import replace
from math import inf

import pytest

from scheduler.config import MAX_STEP_DRAFTS, SpeculativeConfig
from scheduler.drafts import LookupDrafter
from scheduler.plan import FAILED_TOKEN, RowLogprobs, floats, ints
from scheduler.request import FinishReason, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.speculation import FIXED_ROWS, Proposal, choose_drafts, verify
from tests.scheduler.driving import A, answer, ask, make, outputs, run, show, sizes, step, with_config

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4)


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
    return Sequence(
        request=ask(0, 3), arrival=0, deadline=0.0, max_total=1000, tokens=ints(list(range(3 + num_outputs)))
    )


@pytest.mark.parametrize(
    ("rate", "num_rows", "expected"),
    [(1.0, 1, 4), (0.5, 1, 2), (0.1, 1, 0), (0.2, 1, 1), (0.8, 64, 0), (0.95, 64, 2), (1.0, 64, 4)],
)
def test_drafts_are_as_many_as_are_worth_their_rows(rate: float, num_rows: int, expected: int) -> None:
    """One sequence and a right guess in two: the second draft is a token in four, worth its tenth of a step."""
    assert FIXED_ROWS == 8
    [drafts] = choose_drafts(Stub([5, 6, 7, 8], rate), [_sequence()], num_rows, room=100)
    assert drafts.tolist() == [5, 6, 7, 8][:expected]


def _drive(scheduler: Scheduler, text: list[int], num_prompt: int) -> list[int]:
    """A model that goes on with `text` whatever is drafted; tokens of each step."""
    scheduler.add(ask(0, text[:num_prompt], max_tokens=len(text) - num_prompt), 0.0)
    known, counts = num_prompt, []
    while (plan := scheduler.plan(0.0)) is not None:
        counts.append(len(plan.token_ids))
        rows = len(plan.sample.rows)
        scheduler.commit(answer(plan, (text + [0] * rows)[known : known + rows]), 0.0)
        known += sum(len(event.token_ids) for event in scheduler.take_events())
    return counts


def test_ngram_drafts_what_followed_the_same_tokens_before() -> None:
    scheduler = make(config=with_config(speculative_config=NGRAM), num_blocks=1000)
    text = list(range(100, 130))
    counts = _drive(scheduler, text + text, 32)
    assert counts[0] == 32
    assert counts[1:] == [3, 5, 5, 5, 5, 4]  # trusted little at first
    stats = scheduler.stats()
    assert stats.speculation.draft_tokens - stats.speculation.accepted_tokens == 0


def test_drafts_that_never_hit_are_given_up_and_found_again() -> None:
    """Each pair of tokens has been seen before, and never goes on as it did; in the end the text repeats for once."""
    scheduler = make(config=with_config(speculative_config=NGRAM), num_blocks=1000)
    misleading = [token for index in range(40) for token in (1, 2, 1000 + index)]
    repeated = list(range(100, 120))
    counts = _drive(scheduler, misleading + repeated + repeated, 6)
    drafted = [count - 1 for count in counts[1:]]
    assert sum(drafted[:24]) == 9
    assert drafted[24:100] == [0] * 76
    assert max(drafted[-10:]) == 4


def _answered(scheduler: Scheduler, seq_id: int, text: list[int], salt: bytes = b"") -> list[int]:
    """A request of five tokens of its own, answered with `text`; tokens of each step after the prompt's."""
    scheduler.add(ask(seq_id, cache_salt=salt, max_tokens=len(text)), 0.0)
    known, counts = 0, []
    while (plan := scheduler.plan(0.0)) is not None:
        counts.append(len(plan.token_ids))
        rows = len(plan.sample.rows)
        scheduler.commit(answer(plan, (text + [0] * rows)[known : known + rows]), 0.0)
        known += sum(len(event.token_ids) for event in scheduler.take_events())
    return counts[1:]


def test_suffix_drafts_what_the_same_tenant_was_answered_before() -> None:
    scheduler = make(config=with_config(speculative_config=replace(NGRAM, method="suffix")), num_blocks=1000)
    text = list(range(100, 130))
    assert _answered(scheduler, 0, text) == [1] * 29
    assert _answered(scheduler, 1, text, b"another") == [1] * 29
    again = _answered(scheduler, 2, text)
    assert again[:3] == [1, 3, 5]  # two tokens are needed to find it
    assert len(again) == 7
    assert len(_answered(scheduler, 3, text, b"another")) == 7


def test_images_are_no_drafts() -> None:
    drafter = LookupDrafter(4, 2, 8)
    request = show(0, [1, 2, A, 1, 2], pixels=False)
    seq = Sequence(request=request, arrival=0, deadline=0.0, max_total=99, tokens=request.prompt_ids[:])
    seq.image_end = 10
    assert len(drafter.propose(seq).tokens) == 0


def test_guesses_of_a_preempted_sequence_are_forgotten() -> None:
    scheduler = make(num_blocks=4, config=with_config(speculative_config=NGRAM))
    for seq_id in (0, 1):
        scheduler.add(ask(seq_id, [5, 6, 5, 6, 5, 6, seq_id], max_tokens=8), 0.0)
    _, events = run(scheduler)
    assert scheduler.stats().preemptions > 0
    assert outputs(events) == {0: [7] * 8, 1: [7] * 8}


def test_drafter_hears_of_every_end() -> None:
    drafter = Stub([])
    scheduler = make(drafter=drafter)
    for seq_id in (0, 1):
        scheduler.add(ask(seq_id, 5, max_tokens=2), 0.0)
    scheduler.abort(1)
    run(scheduler)
    assert drafter.finished == [1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be from 1 to 32"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens must be from 1 to 32"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be from 1"),
        ({"prompt_lookup_min": 9}, "prompt_lookup_min must be from 1 to prompt_lookup_max"),
        ({"prompt_lookup_max": 65}, "at most 64"),
        ({"method": "suffix", "prompt_lookup_max": 4}, "are for the method ngram"),
        ({"method": "draft"}, "model names the draft model"),
        ({"model": "x"}, "model names the draft model"),
        ({"method": "self"}, "num_draft_layers is a positive number"),
        ({"method": "self", "num_draft_layers": -1}, "num_draft_layers is a positive number"),
        ({"num_draft_layers": 2}, "num_draft_layers is a positive number"),
    ],
)
def test_configuration_is_checked(changes: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(NGRAM, **changes)  # type: ignore[arg-type]
