"""Images that fail, are refused, or whose sequences end: what is kept of them, and who ends with them."""

import weakref
from dataclasses import replace

import pytest

from scheduler.encoder_cache import EncoderLimits
from scheduler.plan import FAILED_TOKEN
from scheduler.request import FinishReason, NeverFits, PixelsMissing, QueueFull
from tests.scheduler.driving import (
    ENCODER,
    A,
    B,
    answer,
    ask,
    encoded,
    make,
    picture,
    run,
    show,
    sizes,
    step,
    with_config,
)


def test_an_image_without_planned_memory_is_refused() -> None:
    pixels = show(0, [1, A, 2]).images.images[0].num_pixels
    make(encoder=replace(ENCODER, max_image_pixels=pixels)).add(show(0, [1, A, 2]), 0.0)
    scheduler = make(encoder=replace(ENCODER, max_image_pixels=pixels - 1))
    with pytest.raises(NeverFits, match=rf"needs {pixels} pixels of one preprocessed image.*at most {pixels - 1}"):
        scheduler.add(show(0, [1, A, 2]), 0.0)


def test_failed_image_ends_those_that_need_it_alone() -> None:
    scheduler = make()
    scheduler.add(show(0, [1, A, 2]), 0.0)
    scheduler.add(show(1, [3, B, 4]), 0.0)
    scheduler.add(show(2, [5, B, 6]), 0.0)
    scheduler.add(ask(3, 4), 0.0)
    plan = step(scheduler, failed_slots=[1])
    assert encoded(plan) == "AB"
    events = {event.seq_id: event for event in scheduler.take_events()}
    reasons = {seq_id: event.finish_reason for seq_id, event in events.items()}
    assert reasons == {0: None, 1: FinishReason.ERROR, 2: FinishReason.ERROR, 3: None}
    assert events[1].message == "an image could not be encoded"
    assert (events[0].token_ids, events[1].token_ids) == ((7,), ())
    assert scheduler.stats().encoder_bytes == 80
    scheduler.add(show(4, [3, B, 4]), 0.0)  # nothing is kept of it, neither embeddings nor blocks; no slot is dropped
    plan = step(scheduler)
    assert (encoded(plan), plan.encode.slots.tolist(), plan.drop_slots.tolist(), sizes(plan)) == (
        "B",
        [1],
        [],
        [1, 1, 10],
    )


def test_sequence_that_failed_before_its_image_was_reached_keeps_nothing() -> None:
    scheduler = make(config=with_config(max_num_batched_tokens=8))
    scheduler.add(show(0, [1, 2, 3, 4, 5, A, 6]), 0.0)
    step(scheduler)
    scheduler.abort(0)
    scheduler.check_invariants()
    assert scheduler.stats().encoder_bytes == 80
    scheduler.add(show(1, [1, A, 6]), 0.0)
    assert encoded(step(scheduler)) == ""
    step(scheduler, tokens=[FAILED_TOKEN])
    scheduler.check_invariants()


def test_abort_between_plan_and_commit_keeps_the_image_or_forgets_a_failed_one() -> None:
    for failed, again in (((), ""), ((0,), "A")):
        scheduler = make()
        scheduler.add(show(0, [1, A, 6]), 0.0)
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.abort(0)
        scheduler.commit(answer(plan, failed_slots=failed), 0.0)
        scheduler.check_invariants()
        scheduler.add(show(1, [1, A, 6]), 0.0)
        assert encoded(step(scheduler)) == again
    with pytest.raises(AssertionError, match=r"slots \[5\] failed that were not to be encoded"):
        step(scheduler, failed_slots=[5])


def test_pixels_are_kept_as_long_as_somebody_may_need_them() -> None:
    scheduler = make()
    with pytest.raises(PixelsMissing, match="the pixels of 2 of 2 images are not here"):
        scheduler.add(show(0, [A, B, 1], pixels=False), 0.0)
    assert not scheduler.has_work()
    scheduler.add(show(0, [A, B, 1]), 0.0)
    scheduler.add(show(1, [A, 1], pixels=False), 0.0)
    scheduler.abort(0)
    scheduler.add(show(2, [A, 2], pixels=False), 0.0)
    with pytest.raises(PixelsMissing, match="1 of 2 images"):
        scheduler.add(show(3, [A, B, 2], pixels=False), 0.0)
    scheduler.check_invariants()
    assert encoded(step(scheduler)) == "A"
    scheduler.abort(1)
    scheduler.abort(2)
    with pytest.raises(PixelsMissing):  # encoded, but it could not be again
        scheduler.add(show(4, [A, 2], pixels=False), 0.0)


def test_no_request_outlives_its_end() -> None:
    """Else an idle server would keep the pixels of those that ended last."""
    scheduler, request = make(), show(0, [1, A, 2])
    prompt = weakref.ref(request.prompt_ids)
    scheduler.add(request, 0.0)
    del request
    run(scheduler)
    assert prompt() is None


def test_image_that_never_fits_is_refused_with_both_numbers() -> None:
    scheduler = make()
    with pytest.raises(NeverFits, match=r"needs 1010 bytes of encoder cache for one image.*at most 1000"):
        scheduler.add(show(0, [picture("A", 101), 1]), 0.0)
    scheduler.add(show(0, [picture("A", 60, 40), 1], max_tokens=1), 0.0)
    assert len(run(scheduler)[1]) == 1


def test_refusals_come_before_pixels_are_asked_for() -> None:
    scheduler = make(config=with_config(max_num_seqs=1, max_queued_requests=0))
    scheduler.add(ask(0), 0.0)
    with pytest.raises(QueueFull):
        scheduler.add(show(1, [A, 1], pixels=False), 0.0)


def test_images_for_a_model_without_are_a_broken_invariant() -> None:
    scheduler = make(encoder=EncoderLimits())
    with pytest.raises(AssertionError, match="images for a model that has none"):
        scheduler.add(show(0, [A, 1]), 0.0)
