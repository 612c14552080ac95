"""Submit messages with images: the round trip, and every frame that contradicts another is refused."""

from array import array
from typing import Any

import msgspec
import pytest

from scheduler.plan import ImagePixels, ints
from scheduler.request import NO_IMAGES, Image, PromptImages, SamplingParams, Span
from server import wire
from server.generation import GenerationRequest
from server.wire_submit import submits_of, unpack_images, with_images

RED, BLUE = b"r" * 32, b"b" * 32


def image(key: bytes, *, tiles: int = 1, height: int = 2, width: int = 3, embeddings: int = 4) -> Image:
    """Its bytes count up from the first byte of the key."""
    size = tiles * height * width * 3
    pixels = ImagePixels(
        data=bytes((key[0] + index) % 256 for index in range(size)),
        tiles=tiles,
        height=height,
        width=width,
        rows=2,
        cols=1,
        image_height=20,
        image_width=30,
    )
    return Image(key=key, num_embeddings=embeddings, num_pixels=pixels.num_pixels, pixels=pixels)


IMAGES = PromptImages(
    images=(image(RED), image(BLUE, tiles=2, embeddings=3), image(RED)),
    spans=(Span(1, 4, 0, 0), Span(5, 2, 1, 0), Span(8, 1, 1, 2), Span(9, 4, 2, 0)),
    rope_positions=ints(list(range(42))),
    rope_delta=-5,
)
REQUEST = GenerationRequest(
    prompt_ids=array("i", range(14)), sampling=SamplingParams(max_tokens=4, seed=1), n=2, cache_salt=b"s", images=IMAGES
)


def submit(brings: set[bytes]) -> tuple[wire.Submit, list[bytes]]:
    """As the engine receives it."""
    leader, follower = submits_of(REQUEST, range(7, 9), 5.0)
    assert (leader.seq_id, leader.leader, follower.seq_id, follower.leader) == (7, None, 8, 7)
    assert leader.sampling.seed != follower.sampling.seed
    message, frames = with_images(leader, IMAGES, brings)
    decoded = wire.decode_to_engine(wire.encode(message))
    assert isinstance(decoded, wire.Submit)
    return decoded, [bytes(frame) for frame in frames]


def test_everything_arrives() -> None:
    message, frames = submit({RED, BLUE})
    assert len(frames) == 2, "the second red image needs no pixels"
    found = unpack_images(message, frames)
    assert (found.spans, found.rope_positions, found.rope_delta) == (IMAGES.spans, IMAGES.rope_positions, -5)
    assert found.images[:2] == IMAGES.images[:2]
    assert (found.images[2].key, found.images[2].pixels, found.images[2].num_pixels) == (RED, None, 6)
    assert wire.unpack_ids(message.prompt_ids) == REQUEST.prompt_ids


@pytest.mark.parametrize(("brings", "held"), [(set(), [False] * 3), ({BLUE}, [False, True, False])])
def test_pixels_that_the_engine_has_stay_here(brings: set[bytes], held: list[bool]) -> None:
    message, frames = submit(brings)
    assert [header.has_pixels for header in message.images] == held
    assert [entry.pixels is not None for entry in unpack_images(message, frames).images] == held


def test_text_needs_nothing() -> None:
    message = msgspec.structs.replace(submit(set())[0], images=(), spans=b"", rope_positions=b"")
    assert unpack_images(message, []) is NO_IMAGES


def spans(*numbers: int) -> bytes:
    return ints(list(numbers)).tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"spans": spans(1, 4, 0)},
        {"spans": spans(1, 4, 0, 0)[:-1]},
        {"spans": spans(1, 0, 0, 0)},
        {"spans": spans(-1, 4, 0, 0)},
        {"spans": spans(1, 4, 3, 0)},
        {"spans": spans(1, 4, -1, 0)},
        {"spans": spans(1, 4, 0, 1)},
        {"spans": spans(1, 2, 0, -1)},
        {"spans": spans(1, 4, 0, 0, 4, 1, 1, 0)},
        {"spans": spans(11, 4, 0, 0)},
        {"rope_positions": spans(*range(41))},
        {"rope_positions": spans(*range(39))},
        {"rope_positions": spans(*range(45))},
        {"images": ()},
    ],
)
def test_contradictions(changes: dict[str, Any]) -> None:
    message, frames = submit({RED, BLUE})
    with pytest.raises(wire.WireError):
        unpack_images(msgspec.structs.replace(message, **changes), frames)


@pytest.mark.parametrize(
    "changes",
    [
        {"key": RED[1:]},
        {"tiles": 0},
        {"height": 0},
        {"width": 4},
        {"height": -2, "tiles": -1},
        {"num_embeddings": 0},
        {"image_width": 0},
        {"rows": -1},
        {"tiles": 2**40},
        {"has_pixels": False},
    ],
)
def test_headers_that_no_image_has(changes: dict[str, Any]) -> None:
    message, frames = submit({RED})
    first, *others = message.images
    changed = msgspec.structs.replace(message, images=(msgspec.structs.replace(first, **changes), *others))
    with pytest.raises(wire.WireError):
        unpack_images(changed, frames)


def test_frames_that_are_missing_or_too_many() -> None:
    message, frames = submit({RED, BLUE})
    for wrong in ([], frames[:1], [*frames, b""], [frames[1], frames[0]], [frames[0][:-1], frames[1]]):
        with pytest.raises(wire.WireError):
            unpack_images(message, wrong)
