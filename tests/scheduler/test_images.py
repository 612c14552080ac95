"""What is encoded when, and how far prompts with images are computed. Driven by hand-built results."""

from dataclasses import replace

import pytest

from scheduler.fake_runtime import IMAGE_TOKEN
from scheduler.request import FinishReason
from tests.scheduler.driving import (
    ENCODER,
    A,
    B,
    C,
    D,
    ask,
    encoded,
    make,
    picture,
    run,
    show,
    sizes,
    spans,
    step,
    with_config,
)


def test_first_plan_with_an_image_says_everything() -> None:
    scheduler = make()
    scheduler.add(show(1, [11, 12, picture("A", 5), 13]), 0.0)
    plan = step(scheduler)
    assert plan.token_ids.tolist() == [11, 12, *[IMAGE_TOKEN] * 5, 13]
    assert (plan.encode.slots.tolist(), plan.encode.num_embeddings.tolist(), encoded(plan)) == ([0], [5], "A")
    assert plan.encode.pixels[0].num_pixels == 50
    assert spans(plan) == [(2, 5, 0, 0, 2, 7)]
    assert (plan.drop_slots.tolist(), plan.rope_positions.tolist(), plan.sample.rows.tolist()) == ([], [], [7])
    following = step(scheduler)
    assert (encoded(following), spans(following), sizes(following)) == ("", [], [1])
    stats = scheduler.stats()
    assert (stats.images_encoded, stats.encoder_hits, stats.encoder_bytes) == (1, 0, 50)


def test_chunks_reach_into_a_span_and_go_on_there() -> None:
    scheduler = make(config=with_config(max_num_batched_tokens=8))
    scheduler.add(show(0, [1, 2, picture("A", 10), 3, 4]), 0.0)
    first, second = step(scheduler), step(scheduler)
    assert [spans(first), spans(second)] == [[(2, 6, 0, 0, 2, 12)], [(0, 4, 0, 6, 2, 12)]]
    assert [encoded(first), encoded(second)] == ["A", ""]


def test_image_of_several_spans() -> None:
    scheduler = make(config=with_config(max_num_batched_tokens=8))
    scheduler.add(show(0, [1, picture("A", 3, 3, 2), 2]), 0.0)  # 1 aaa 3 aaa 3 aa 2
    plans = [step(scheduler), step(scheduler)]
    assert [spans(plan) for plan in plans] == [[(1, 3, 0, 0, 1, 4), (5, 3, 0, 3, 5, 8)], [(1, 2, 0, 6, 9, 11)]]


def test_images_of_many_requests_are_encoded_in_one_step_and_equal_ones_once() -> None:
    scheduler = make()
    scheduler.add(show(0, [1, A, 2, A]), 0.0)
    scheduler.add(show(1, [3, B, 4], pixels=True), 0.0)
    scheduler.add(show(2, [5, A, 6], pixels=False), 0.0)
    plan = step(scheduler)
    assert (sizes(plan), encoded(plan)) == ([10, 10, 18], "AB")
    assert [(row, length, slot) for row, length, slot, *_ in spans(plan)] == [
        (1, 8, 1),
        (11, 8, 0),
        (21, 8, 0),
        (30, 8, 0),
    ]
    assert (scheduler.stats().images_encoded, scheduler.stats().encoder_hits) == (2, 2)
    scheduler.add(show(3, [7, B, 8]), 0.0)
    assert encoded(step(scheduler)) == ""


@pytest.mark.parametrize(("max_pixels", "jobs"), [(160, ["AB", "CD"]), (159, ["A", "B", "C", "D"]), (1, list("ABCD"))])
def test_encode_budget_bounds_the_pixels_of_a_step_but_one_image_always_goes(max_pixels: int, jobs: list[str]) -> None:
    scheduler = make(config=with_config(max_encode_pixels=max_pixels))
    for seq_id, image in enumerate((A, B, C, D)):
        scheduler.add(show(seq_id, [seq_id, image, 9], max_tokens=1), 0.0)
    assert [encoded(plan) for plan in run(scheduler)[0]] == jobs


def test_encode_budget_is_shared_with_streams() -> None:
    scheduler = make(config=with_config(max_encode_pixels=640))
    scheduler.add(ask(9), 0.0)
    step(scheduler)
    for seq_id, image in enumerate((A, B, C)):
        scheduler.add(show(seq_id, [seq_id, image, 9], max_tokens=1), 0.0)
    assert [encoded(step(scheduler)) for _ in range(2)] == ["AB", "C"]  # a quarter: 160 pixels


def test_text_before_an_image_is_computed_while_the_image_waits() -> None:
    scheduler = make(config=with_config(max_encode_pixels=1))
    scheduler.add(show(0, [1, A, 2], max_tokens=1), 0.0)
    scheduler.add(show(1, [3, 4, 5, B, 6], max_tokens=1), 0.0)
    plans = run(scheduler)[0]
    assert [(sizes(plan), encoded(plan)) for plan in plans] == [([3, 10], "A"), ([9], "B")]


def test_images_are_encoded_as_far_ahead_as_a_step_could_reach() -> None:
    scheduler = make(encoder=replace(ENCODER, cache_bytes=2000))
    scheduler.add(show(0, [picture(name, 40) for name in "ABCD"] + [1], max_tokens=1), 0.0)
    assert [encoded(plan) for plan in run(scheduler)[0]] == ["AB", "CD", ""]  # 64 tokens a step: 0..63, 64..127


def test_unused_images_stay_until_their_memory_is_needed_and_the_oldest_goes_first() -> None:
    scheduler = make(encoder=replace(ENCODER, cache_bytes=249), config=with_config(enable_prefix_caching=False))
    for seq_id, image in enumerate((A, B, C)):
        scheduler.add(show(seq_id, [1, image, 2], max_tokens=1), 0.0)
        step(scheduler)
    assert scheduler.stats().encoder_bytes == 240
    scheduler.add(show(3, [1, A, 2], max_tokens=1), 0.0)
    plan = step(scheduler)
    assert (encoded(plan), plan.drop_slots.tolist(), scheduler.stats().encoder_hits) == ("", [], 1)
    scheduler.add(show(4, [1, D, 2], max_tokens=1), 0.0)
    plan = step(scheduler)
    assert (encoded(plan), plan.drop_slots.tolist(), plan.encode.slots.tolist()) == ("D", [1], [1])  # B was there
    scheduler.add(show(5, [1, B, 2], max_tokens=1), 0.0)
    plan = step(scheduler)
    assert (encoded(plan), plan.drop_slots.tolist()) == ("B", [2])


def test_last_row_alone_is_an_image() -> None:
    """One token remains, as of a sequence that decodes, but its embedding has to be there."""
    scheduler = make(config=with_config(max_num_batched_tokens=8, prefill_share=1.0))
    scheduler.add(show(0, [1, A], max_tokens=2), 0.0)
    assert spans(step(scheduler)) == [(1, 7, 0, 0, 1, 9)]
    plan = step(scheduler)
    assert (sizes(plan), spans(plan), plan.sample.rows.tolist()) == ([1], [(0, 1, 0, 7, 1, 9)], [0])
    assert (sizes(step(scheduler)), scheduler.has_work()) == ([1], False)


def test_eight_prompts_of_three_images_finish_with_memory_for_one() -> None:
    scheduler = make(num_blocks=400, encoder=replace(ENCODER, cache_bytes=80))
    for seq_id in range(8):
        images = [picture(chr(65 + 3 * seq_id + index), 8) for index in range(3)]
        scheduler.add(show(seq_id, [seq_id, images[0], 1, images[1], 2, images[2], 3], max_tokens=3), 0.0)
    plans, events = run(scheduler, max_steps=100)
    assert sorted(event.seq_id for event in events if event.finish_reason is FinishReason.LENGTH) == list(range(8))
    assert all(len(encoded(plan)) <= 1 for plan in plans)
    assert (scheduler.stats().images_encoded, scheduler.stats().encoder_bytes) == (24, 80)


def test_better_rank_takes_the_memory_of_the_worst_and_nothing_more() -> None:
    scheduler = make(encoder=replace(ENCODER, cache_bytes=250), config=with_config(max_num_batched_tokens=8))
    for seq_id, image in enumerate((A, B, C)):
        scheduler.add(show(seq_id, [seq_id, image, *range(30)], priority=1, max_tokens=1), 0.0)
    assert encoded(step(scheduler)) == "ABC"  # and eight tokens of the first: all three still need their images
    scheduler.add(show(3, [D, 1], priority=0, max_tokens=1), 0.0)
    plan = step(scheduler)
    assert (encoded(plan), plan.drop_slots.tolist()) == ("D", [2])  # the last in rank loses its own
    _, events = run(scheduler)
    assert scheduler.stats().images_encoded == 5  # C comes again
    assert sum(event.finish_reason is FinishReason.LENGTH for event in events) == 4


def test_memory_is_taken_for_the_next_image_only() -> None:
    scheduler = make(encoder=replace(ENCODER, cache_bytes=159), config=with_config(max_num_batched_tokens=8))
    scheduler.add(show(0, [0, A, 1], priority=1, max_tokens=1), 0.0)
    assert encoded(step(scheduler)) == "A"  # seven of its eight rows are computed
    scheduler.add(show(1, [1, picture("E", 4), picture("F", 4), 2], max_tokens=1), 0.0)
    plans = run(scheduler)[0]
    # F stands within reach as well, but it can wait until E is done.
    assert [(sizes(plan), encoded(plan), plan.drop_slots.tolist()) for plan in plans] == [
        ([5, 2], "E", []),
        ([5], "F", [1]),
    ]


def test_preempted_sequence_encodes_again_what_was_evicted() -> None:
    config = with_config(enable_prefix_caching=False, max_num_seqs=2)
    scheduler = make(num_blocks=8, config=config, encoder=replace(ENCODER, cache_bytes=80))
    scheduler.add(show(0, [1, A, 2], max_tokens=10), 0.0)
    scheduler.add(show(1, [1, B, 2], max_tokens=10), 0.0)
    plans = [step(scheduler) for _ in range(8)]
    assert scheduler.stats().preemptions == 1
    scheduler.add(show(2, [1, C, 2], priority=-1, max_tokens=1), 0.0)
    plans += run(scheduler)[0]
    assert [encoded(plan) for plan in plans if encoded(plan)] == ["A", "B", "C", "B"]
    assert sizes(plans[-4]) == [16]  # the prompt and six outputs of the preempted one


def test_preemption_within_an_image_gives_its_pin_back() -> None:
    config = with_config(max_num_seqs=2, prefill_share=0.01, enable_prefix_caching=False)
    scheduler = make(num_blocks=8, config=config)
    scheduler.add(ask(0, 4, max_tokens=20), 0.0)
    step(scheduler)
    scheduler.add(show(1, [1, picture("A", 14), 2], max_tokens=1), 0.0)
    plans = [step(scheduler) for _ in range(13)]  # a token of the prompt in each step, until 0 needs a fifth block
    assert [len(sizes(plan)) for plan in plans] == [2] * 12 + [1]
    assert (scheduler.stats().preemptions, len(spans(plans[-2]))) == (1, 1)
    run(scheduler)
    assert (scheduler.stats().images_encoded, scheduler.stats().encoder_hits) == (1, 0)
