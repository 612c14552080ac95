"""From sampling parameters to plan rows."""

from array import array
from collections.abc import Sequence
from dataclasses import fields
from math import inf

from scheduler.masks import MaskRow
from scheduler.plan import FAILED_TOKEN, SampleRows, ints
from scheduler.request import FinishReason, OutputGrammar, SamplingParams
from scheduler.scheduler import Scheduler
from tests.scheduler.driving import ask, make, step

BANS = SamplingParams(max_tokens=9, bad_words=((5,), (6, 7), (6, 7, 8)))


def _bias(sample: SampleRows, row: int = 0) -> list[tuple[int, float]]:
    start, end = sample.bias_offsets[row], sample.bias_offsets[row + 1]
    return list(zip(sample.bias_ids[start:end], sample.bias_values[start:end], strict=True))


def test_every_parameter_reaches_its_buffer() -> None:
    sampling = SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        min_p=0.125,
        seed=2**64 - 1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logprobs=4,
    )
    scheduler = make()
    scheduler.add(ask(0, [1, 2, 3]), 0.0)
    scheduler.add(ask(1, [4, 5], sampling=sampling), 0.0)
    rows = step(scheduler, tokens=[8, 9]).sample
    # The shorter prompt comes first.
    assert (rows.rows.tolist(), rows.temperature.tolist(), rows.top_k.tolist()) == ([1, 4], [0.5, 1.0], [3, 0])
    assert (rows.top_p.tolist(), rows.min_p.tolist()) == ([0.75, 1.0], [0.125, 0.0])
    assert (rows.seed.tolist(), rows.counter.tolist()) == ([2**64 - 1, 0], [0, 0])
    assert (rows.presence_penalty.tolist(), rows.frequency_penalty.tolist()) == ([0.25, 0.0], [-0.5, 0.0])
    assert (rows.repetition_penalty.tolist(), rows.top_logprobs.tolist()) == ([1.5, 1.0], [4, -1])
    assert (rows.history_ids.tolist(), rows.history_offsets.tolist()) == ([4, 5], [0, 2, 2])
    later = step(scheduler).sample
    assert (later.history_ids.tolist(), later.history_offsets.tolist()) == ([4, 5, 8], [0, 0, 3])
    assert (later.history_output_starts.tolist(), later.counter.tolist()) == ([0, 2], [1, 1])


def test_rows_are_complete_for_every_buffer() -> None:
    scheduler = make()
    for seq_id in range(3):
        scheduler.add(ask(seq_id, 3), 0.0)
    rows = step(scheduler).sample
    ragged = {"history_ids": 0, "history_offsets": 4, "bias_ids": 0, "bias_values": 0, "bias_offsets": 4}
    ragged |= {"mask_rows": 0, "masks": 0}
    lengths = {field.name: len(getattr(rows, field.name)) for field in fields(rows)}
    assert lengths == {name: ragged.get(name, 3) for name in lengths}


def test_end_tokens_are_banned_until_min_tokens() -> None:
    sampling = SamplingParams(
        max_tokens=9, min_tokens=2, eos_token_ids=(2,), stop_token_ids=(3, 4), logit_bias=((9, 1.5),)
    )
    scheduler = make()
    scheduler.add(ask(0, [2, 3], sampling=sampling), 0.0)
    banned = [(9, 1.5), (2, -inf), (3, -inf), (4, -inf)]
    assert [_bias(step(scheduler).sample) for _ in range(3)] == [banned, banned, [(9, 1.5)]]


def test_bad_words_are_banned_one_token_short() -> None:
    scheduler = make()
    scheduler.add(ask(0, [6, 7], sampling=BANS), 0.0)  # the prompt is not part of what is produced
    bans = [_bias(step(scheduler, tokens=[token]).sample) for token in (6, 6, 7, 1)]
    assert bans == [
        [(5, -inf)],
        [(5, -inf), (7, -inf)],
        [(5, -inf), (7, -inf)],
        [(5, -inf), (8, -inf)],
    ]


class Evens:
    """Allows a token after an even one, and after an odd one another token and the end token 2."""

    def next_tokens(self, rows: Sequence[MaskRow]) -> "array[int]":
        assert [(row.seq_id, row.num_prompt) for row in rows] == [(0, 2)]
        last = (*rows[0].tokens[2:], *rows[0].drafts)[-1:] or (0,)
        return ints([0, 1 << 1] if last[0] % 2 == 0 else [1 << 2, 1 << 8])


GRAMMAR = OutputGrammar(source="any")


def _with_masks(sampling: SamplingParams) -> Scheduler:
    scheduler = make(masks=Evens())
    scheduler.add(ask(0, [2, 3], sampling=sampling), 0.0)
    scheduler.add(ask(1, 3), 0.0)
    return scheduler


def _masks(sample: SampleRows) -> tuple[list[int], list[int]]:
    return sample.mask_rows.tolist(), sample.masks.tolist()


def test_masks_are_of_the_rows_with_a_grammar() -> None:
    scheduler = _with_masks(SamplingParams(max_tokens=9, eos_token_ids=(2,), grammar=GRAMMAR))
    assert _masks(step(scheduler, tokens=[33, 7]).sample) == ([0], [0, 2])
    assert _masks(step(scheduler, tokens=[40, 7]).sample) == ([0], [4, 256])
    assert _masks(step(scheduler, tokens=[33, 7]).sample) == ([0], [0, 2])


def test_end_tokens_leave_a_mask_until_min_tokens_unless_nothing_else_is_left() -> None:
    sampling = SamplingParams(max_tokens=9, min_tokens=3, eos_token_ids=(2,), grammar=GRAMMAR)
    scheduler = _with_masks(sampling)
    first = step(scheduler, tokens=[33, 7]).sample
    assert (_masks(first), _bias(first)) == (([0], [0, 2]), [])
    assert _masks(step(scheduler, tokens=[33, 7]).sample) == ([0], [0, 256])
    step(scheduler, tokens=[33, 7])
    assert _masks(step(scheduler, tokens=[40, 7]).sample) == ([0], [4, 256])
    forced = _with_masks(SamplingParams(max_tokens=9, min_tokens=3, eos_token_ids=(33,), grammar=GRAMMAR))
    assert _masks(step(forced, tokens=[33, 7]).sample) == ([0], [0, 2])


def test_a_dead_end_ends_its_sequence_alone() -> None:
    scheduler = _with_masks(SamplingParams(max_tokens=9, grammar=GRAMMAR))
    step(scheduler, tokens=[FAILED_TOKEN, 7])
    failed, other = scheduler.take_events()
    assert (failed.seq_id, failed.finish_reason) == (0, FinishReason.DEAD_END)
    assert failed.message.startswith("no token is left that the grammar allows and that is not banned")
    assert (other.seq_id, other.token_ids, other.finish_reason) == (1, (7,), None)
    scheduler.check_invariants()
