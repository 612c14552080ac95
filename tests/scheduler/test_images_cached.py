"""Prompts with images in the prefix cache: what is shared, what tells blocks apart, what need not be encoded."""

from dataclasses import replace

import pytest

from tests.scheduler.driving import ENCODER, A, B, C, encoded, make, picture, run, show, sizes, spans, step


def test_images_behind_a_prefix_hit_are_not_encoded() -> None:
    scheduler = make(encoder=replace(ENCODER, cache_bytes=80))
    scheduler.add(show(0, [A, B, 1, 2], max_tokens=1), 0.0)
    assert [encoded(plan) for plan in run(scheduler)[0]] == ["A", "B"]
    scheduler.add(show(1, [C, 1], max_tokens=1), 0.0)
    assert encoded(step(scheduler)) == "C"
    scheduler.add(show(2, [A, B, 1, 2], max_tokens=1), 0.0)
    plan = step(scheduler)
    assert (sizes(plan), encoded(plan)) == ([2], "")
    scheduler.add(show(3, [A, 5, B, 2], max_tokens=1), 0.0)  # A is in the prefix cache, B stands elsewhere
    plan = step(scheduler)
    assert (sizes(plan), encoded(plan)) == ([10], "B")


def test_same_text_with_other_images_shares_what_stands_before_them() -> None:
    scheduler = make()
    text, question = list(range(50, 56)), [1, 2, 3]
    for seq_id, image in enumerate((A, A, B, A)):
        scheduler.add(show(seq_id, [*text, image, *question], max_tokens=1), 0.0)
        step(scheduler)
    assert [event.cached_tokens for event in scheduler.take_events()] == [0, 16, 4, 16]
    assert (scheduler.stats().images_encoded, scheduler.stats().encoder_hits) == (2, 0)


@pytest.mark.parametrize("num_text", range(1, 10))
def test_prefix_hits_at_every_offset_in_a_block(num_text: int) -> None:
    scheduler = make()
    for seq_id, image in enumerate((A, A, B, A, B)):
        scheduler.add(show(seq_id, [*range(num_text), image, 100, 101], max_tokens=1), 0.0)
        step(scheduler)
    most = (num_text + 8 + 1) // 4 * 4
    cached = [event.cached_tokens for event in scheduler.take_events()]
    assert cached == [0, most, num_text // 4 * 4, most, most]


@pytest.mark.parametrize("num_text", range(3))
def test_an_image_within_one_block_tells_the_block_apart(num_text: int) -> None:
    scheduler = make()
    for seq_id, name in enumerate("ABA"):
        ids = [*range(num_text), picture(name, 2), *range(100, 105)]
        scheduler.add(show(seq_id, ids, max_tokens=1), 0.0)
        step(scheduler)
    assert [event.cached_tokens for event in scheduler.take_events()] == [0, 0, (num_text + 6) // 4 * 4]


def test_equal_ids_with_other_images_do_not_wait_for_each_other() -> None:
    scheduler = make()
    for seq_id, image in enumerate((A, B, A)):
        scheduler.add(show(seq_id, [image, 1, 2], max_tokens=1), 0.0)
    plans = run(scheduler)[0]
    assert [(sizes(plan), encoded(plan)) for plan in plans] == [([10, 10], "AB"), ([2], "")]


def test_prompt_that_ends_in_an_image() -> None:
    scheduler = make(encoder=replace(ENCODER, cache_bytes=80))
    for seq_id, before in ((0, 1), (1, 1), (2, 2), (3, 1)):
        image = A if before == 1 else B
        scheduler.add(show(seq_id, [1, image], max_tokens=2), 0.0)
        plan = step(scheduler)
        # Of nine tokens eight are a hit then, so that the last row of the image is all that remains.
        assert spans(plan) == ([(1, 8, 0, 0, 1, 9)] if seq_id in (0, 2) else [(0, 1, 0, 7, 1, 9)])
        assert encoded(plan) == {0: "A", 1: "", 2: "B", 3: "A"}[seq_id]
        assert (sizes(step(scheduler)), scheduler.has_work()) == ([1], False)
