"""Where the rows of images stand in a prompt. Pure functions, used by the scheduler, the prefix cache's keys and the
plan builder, engine process.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from struct import Struct

from scheduler.plan import ImageSpans
from scheduler.request import PromptImages, Span
from scheduler.sequence import Sequence

_SPAN_CONTENT = Struct("<iii")


def image_bounds(images: PromptImages, num_prompt: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(first row, one past the last row) of each image; asserts that spans are ascending, disjoint and in the prompt,
    that images come in order and that no row takes an embedding that its image does not have."""
    starts: list[int] = []
    ends: list[int] = []
    end = 0
    for span in images.spans:
        assert end <= span.offset < span.end <= num_prompt, f"{span} overlaps or leaves the prompt"
        end = span.end
        if span.image == len(starts):
            starts.append(span.offset)
            ends.append(end)
        assert span.image == len(starts) - 1, f"{span} is not in the order of the images"
        assert 0 <= span.first <= images.images[span.image].num_embeddings - span.length, f"{span} exceeds its image"
        ends[-1] = end
    assert len(starts) == len(images.images), f"{len(images.images)} images, spans for {len(starts)}"
    num_rope = len(images.rope_positions)
    assert num_rope in (0, 3 * num_prompt if starts else 0), f"{num_rope} rope positions for {num_prompt} tokens"
    return tuple(starts), tuple(ends)


def overlapping(spans: tuple[Span, ...], start: int, end: int) -> tuple[Span, ...]:
    """The spans with rows among positions start .. end - 1."""
    first = bisect_right(spans, start, key=lambda span: span.end)
    return spans[first : bisect_left(spans, end, lo=first, key=lambda span: span.offset)]


def span_content(images: PromptImages, start: int, end: int) -> bytes:
    """What positions start .. end - 1 hold of images: for each span with rows there its offset from `start`, its
    length, its first embedding and its image's key."""
    return b"".join(
        _SPAN_CONTENT.pack(span.offset - start, span.length, span.first) + images.images[span.image].key
        for span in overlapping(images.spans, start, end)
    )


def uncut(seq: Sequence, num_tokens: int) -> int:
    """The next `num_tokens` tokens, or fewer so that they do not end inside a span; 0 if the first one is longer."""
    end = seq.num_computed + num_tokens
    if end >= seq.image_end:
        return num_tokens
    spans = seq.request.images.spans
    last = bisect_left(spans, end, key=lambda span: span.offset) - 1
    return num_tokens if last < 0 or spans[last].end <= end else max(0, spans[last].offset - seq.num_computed)


def head_span(seq: Sequence) -> int:
    """Tokens up to the end of the span in which the next token stands; 0 if it is none of an image."""
    position = seq.num_computed
    spans = overlapping(seq.request.images.spans, position, position + 1)
    return spans[0].end - position if spans else 0


def add_span_rows(rows: ImageSpans, seq: Sequence, num_tokens: int, row: int, slot: Callable[[bytes], int]) -> None:
    """Append the spans of the sequence's next `num_tokens`, the first of which is the step's token `row`; `slot` tells
    where an image's embeddings are."""
    start, images = seq.num_computed, seq.request.images
    end = start + num_tokens
    for span in overlapping(images.spans, start, end):
        first = max(span.offset, start)
        rows.rows.append(row + first - start)
        rows.lengths.append(min(span.end, end) - first)
        rows.slots.append(slot(images.images[span.image].key))
        rows.firsts.append(span.first + first - span.offset)
        rows.starts.append(span.offset)
        rows.ends.append(span.end)


def add_rope_rows(rows: "array[int]", seq: Sequence, start: int, end: int) -> None:
    """Append the M-RoPE positions of a sequence's tokens at positions start .. end - 1."""
    images, delta = seq.request.images, 0
    if images.rope_positions:
        delta, num_prompt = images.rope_delta, seq.num_prompt
        if start < num_prompt:
            rows.extend(images.rope_positions[3 * start : 3 * min(end, num_prompt)])
            start = num_prompt
    for position in range(start + delta, end + delta):
        rows.extend((position, position, position))
