"""Rows of images in a prompt: bounds, overlaps, what a block holds, what a step takes."""

from array import array

import pytest

from scheduler.image_spans import image_bounds, overlapping, span_content
from scheduler.request import Image, PromptImages, Span


def _images(*spans: tuple[int, int, int, int], count: int = 2, keys: str = "AB", rope: int = 0) -> PromptImages:
    images = tuple(Image(key=key.encode() * 32, num_embeddings=9, num_pixels=90, pixels=None) for key in keys)
    return PromptImages(
        images=images[:count], spans=tuple(Span(*span) for span in spans), rope_positions=_ROPE[: 3 * rope]
    )


_ROPE = array("i", bytes(4 * 3 * 40))

TWO = _images((2, 3, 0, 0), (6, 6, 0, 3), (12, 4, 1, 0))


def test_bounds_of_each_image() -> None:
    assert image_bounds(TWO, 16) == ((2, 12), (12, 16))
    assert image_bounds(_images((0, 9, 0, 0), count=1, rope=10), 10) == ((0,), (9,))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (_images((2, 3, 0, 0), (4, 3, 1, 0)), "overlaps or leaves the prompt"),
        (_images((2, 3, 0, 0), (14, 3, 1, 0)), "overlaps or leaves the prompt"),
        (_images((2, 0, 0, 0), (14, 2, 1, 0)), "overlaps or leaves the prompt"),
        (_images((2, 3, 1, 0), (14, 2, 0, 0)), "not in the order of the images"),
        (_images((2, 2, 0, 0), (5, 2, 1, 0), (8, 2, 0, 2)), "not in the order of the images"),
        (_images((2, 3, 0, 7), (14, 2, 1, 0)), "exceeds its image"),
        (_images((2, 3, 0, 0)), "2 images, spans for 1"),
        (_images((2, 3, 0, 0), (14, 2, 1, 0), rope=15), "45 rope positions for 16 tokens"),
    ],
)
def test_what_contradicts_itself_is_a_broken_invariant(images: PromptImages, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        image_bounds(images, 16)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 2, []), (0, 3, [2]), (4, 5, [2]), (5, 6, []), (5, 7, [6]), (4, 13, [2, 6, 12]), (11, 12, [6]), (16, 99, [])],
)
def test_overlapping_spans(start: int, end: int, expected: list[int]) -> None:
    assert [span.offset for span in overlapping(TWO.spans, start, end)] == expected


def test_content_of_a_block_depends_on_key_offset_length_and_first_embedding() -> None:
    contents = [
        span_content(images, 4, 8)
        for images in (
            _images((5, 3, 0, 0), count=1),
            _images((6, 3, 0, 0), count=1),
            _images((5, 4, 0, 0), count=1),
            _images((5, 3, 0, 1), count=1),
            _images((5, 3, 0, 0), count=1, keys="B"),
            _images((1, 3, 0, 0), (5, 3, 1, 0), keys="CA"),
            _images((1, 3, 0, 0), (5, 3, 1, 0), keys="AA"),
            _images((8, 3, 0, 0), count=1),
        )
    ]
    assert [len(content) for content in contents] == [44] * 7 + [0]
    assert contents[5] == contents[6] == contents[0]  # what lies in the block, wherever it stands in the prompt
    assert len(set(contents)) == 6
