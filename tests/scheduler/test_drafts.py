"""Drafts from text that was seen before: what is found, and when it is given up; how they are configured."""

from dataclasses import replace

import pytest

from scheduler.drafts import LookupDrafter
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.scheduler.driving import NGRAM, A, answer, ask, make, outputs, run, show, with_config


def _answered(scheduler: Scheduler, request: Request, output: list[int]) -> list[int]:
    """A request that is answered with `output` whatever is drafted; tokens of each step."""
    scheduler.add(request, 0.0)
    known, counts = 0, []
    while (plan := scheduler.plan(0.0)) is not None:
        counts.append(len(plan.token_ids))
        rows = len(plan.sample.rows)
        scheduler.commit(answer(plan, (output + [0] * rows)[known : known + rows]), 0.0)
        known += sum(len(event.token_ids) for event in scheduler.take_events())
    return counts


def test_ngram_drafts_what_followed_the_same_tokens_before() -> None:
    scheduler = make(config=with_config(speculative_config=NGRAM), num_blocks=1000)
    text = list(range(100, 130))
    repeated = text + text
    counts = _answered(scheduler, ask(0, repeated[:32], max_tokens=28), repeated[32:])
    assert counts[0] == 32
    assert counts[1:] == [3, 4, 5, 5, 5, 5]  # runs of two and of five tokens are trusted little at first
    stats = scheduler.stats()
    assert stats.speculation.draft_tokens - stats.speculation.accepted_tokens == 0


def test_drafts_that_never_hit_are_given_up_and_found_again() -> None:
    """Each pair of tokens has been seen before, and never goes on as it did; in the end the text repeats for once."""
    scheduler = make(config=with_config(speculative_config=NGRAM), num_blocks=1000)
    misleading = [token for index in range(40) for token in (1, 2, 1000 + index)]
    repeated = list(range(100, 120))
    text = misleading + repeated + repeated
    counts = _answered(scheduler, ask(0, text[:6], max_tokens=len(text) - 6), text[6:])
    drafted = [count - 1 for count in counts[1:]]
    assert sum(drafted[:24]) == 7
    assert drafted[24:100] == [0] * 76
    assert max(drafted[-10:]) == 4


def test_suffix_drafts_what_the_same_tenant_was_answered_before() -> None:
    scheduler = make(config=with_config(speculative_config=replace(NGRAM, method="suffix")), num_blocks=1000)
    text = list(range(100, 130))
    assert _answered(scheduler, ask(0, max_tokens=30), text) == [5] + [1] * 29
    assert _answered(scheduler, ask(1, max_tokens=30, cache_salt=b"another"), text) == [5] + [1] * 29
    again = _answered(scheduler, ask(2, max_tokens=30), text)
    assert again[:5] == [5, 1, 3, 4, 5]  # two tokens are needed to find it, and five to trust it
    assert len(again) == 9
    assert len(_answered(scheduler, ask(3, max_tokens=30, cache_salt=b"another"), text)) == 9


def test_images_are_no_drafts() -> None:
    drafter = LookupDrafter(4, 2, 8)
    request = show(0, [1, 2, A, 1, 2], pixels=False)
    seq = Sequence(request=request, arrival=0, deadline=0.0, longest=99)
    seq.image_end = 10
    assert len(drafter.propose(seq).tokens) == 0


def test_guesses_of_a_preempted_sequence_are_forgotten() -> None:
    scheduler = make(num_blocks=4, config=with_config(speculative_config=NGRAM))
    for seq_id in (0, 1):
        scheduler.add(ask(seq_id, [5, 6, 5, 6, 5, 6, seq_id], max_tokens=8), 0.0)
    _, events = run(scheduler)
    assert scheduler.stats().preemptions > 0
    assert outputs(events) == {0: [7] * 8, 1: [7] * 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be from 1 to 32"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens must be from 1 to 32"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be from 1"),
        ({"prompt_lookup_min": 17}, "prompt_lookup_min must be from 1 to prompt_lookup_max"),
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
