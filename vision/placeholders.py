"""Which tokens stand for an image: counts and markup from its layout, expansion in a prompt, spans, M-RoPE positions.

Pure integers; called by prompt building in the API process. Placeholders are positions that the caller took from the
rendered template, never ids that were looked for: what a user types can be no placeholder.

A family's markup gives an image as *pieces*: a string is markup to be tokenized (special tokens and line breaks), a
number is that many embeddings of the image, in the order in which its tower and projector give them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vision.errors import ImageError
from vision.preprocess.common import Layout

Piece = str | int


class PlaceholderMismatch(ImageError):
    """The prompt has another number of placeholders than the request has images; the message gives both."""

    kind = "image_count"

    def __init__(self, placeholders: int, images: int) -> None:
        super().__init__(f"the prompt has {placeholders} image placeholders for {images} images")
        self.placeholders, self.images = placeholders, images


class Markup(Protocol):
    """A family's tokens for an image."""

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """Markup and counts of embeddings, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The same number of embeddings for every tile, in one run: LLaVA, InternVL, Gemma 3."""

    per_tile: int
    start: str = ""
    end: str = ""

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """The run between `start` and `end`."""
        return tuple(piece for piece in (self.start, self.per_tile * layout.tiles, self.end) if piece != "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """One embedding for every merged patch of `unit` pixels: Qwen2-VL, Qwen2.5-VL, Qwen3-VL."""

    unit: int

    def grid(self, layout: Layout) -> tuple[int, int]:
        """(rows, columns) of embeddings, as M-RoPE positions count them."""
        return layout.height // self.unit, layout.width // self.unit

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """One run; the template itself writes what stands around it."""
        return (math.prod(self.grid(layout)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRows:
    """One embedding for every merged patch, `row_end` after each row but the last, `end` after that: Pixtral."""

    unit: int
    row_end: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """Rows, each followed by its token."""
        rows, cols = layout.height // self.unit, layout.width // self.unit
        return (cols, self.row_end) * (rows - 1) + (cols, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyResolutionTiles:
    """The whole view, then the tiles' embeddings as one picture without its padding, a newline embedding after each
    row: LLaVA-NeXT, LLaVA-OneVision. `side` x `side` embeddings a tile; a picture of much more than `max_tiles` tiles
    is scaled down to about that."""

    side: int
    max_tiles: int | None

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """One run."""
        rows, cols = self.picture(layout)
        return (self.side**2 + rows * (cols + 1),)

    def picture(self, layout: Layout) -> tuple[int, int]:
        """(rows, columns) of the picture's embeddings, newlines not counted."""
        rows, cols = self.side * layout.rows, self.side * layout.cols
        height, width = layout.image_height, layout.image_width
        if width / height > cols / rows:
            rows -= (rows - int(round(height * (cols / width), 7))) // 2 * 2
        else:
            cols -= (cols - int(round(width * (rows / height), 7))) // 2 * 2
        if self.max_tiles is not None:
            ratio = math.sqrt(rows * cols / (self.max_tiles * self.side**2))
            if ratio > 1.1:
                return int(rows // ratio), int(cols // ratio)
        return rows, cols


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTiles:
    """Every tile is named by row and column, the whole view comes last: Idefics3, SmolVLM."""

    per_tile: int
    fake: str = "<fake_token_around_image>"
    whole: str = "<global-img>"

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """A line of tiles for each row, an empty line, the whole view."""
        pieces: list[Piece] = []
        gap = ""
        for row in range(1, layout.rows + 1):
            for col in range(1, layout.cols + 1):
                pieces += [f"{gap}{self.fake}<row_{row}_col_{col}>", self.per_tile]
                gap = ""
            gap = "\n"
        gap = "\n\n" if layout.rows else ""
        return (*pieces, f"{gap}{self.fake}{self.whole}", self.per_tile, self.fake)


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """What replaces one placeholder: token ids, and the runs (offset, length) in them that are embeddings."""

    ids: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]


def image_tokens(pieces: Sequence[Piece], image_token_id: int, encode: Callable[[str], Sequence[int]]) -> ImageTokens:
    """Tokenizes the markup. `encode` knows special tokens and adds none of its own."""
    ids: list[int] = []
    runs = []
    for piece in pieces:
        if isinstance(piece, str):
            ids += encode(piece)
        elif piece:
            runs.append((len(ids), piece))
            ids += [image_token_id] * piece
    return ImageTokens(tuple(ids), tuple(runs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`length` tokens of the prompt from `offset` on are embeddings `first`, `first` + 1, ... of an image."""

    offset: int
    length: int
    image: int
    first: int


@dataclass(frozen=True, slots=True)
class Expansion:
    """A prompt with its images in place. Spans are in order and do not overlap."""

    ids: list[int]
    spans: tuple[Span, ...]


def expand(ids: Sequence[int], positions: Sequence[int], images: Sequence[ImageTokens]) -> Expansion:
    """Replaces the token at each of `positions` (ascending) by the tokens of the image of the same rank. Raises
    PlaceholderMismatch when there are more or fewer positions than images."""
    if len(positions) != len(images):
        raise PlaceholderMismatch(len(positions), len(images))
    ends = (*positions, len(ids))
    assert all(before < after for before, after in zip((-1, *positions), ends, strict=True)), "positions out of order"
    expanded = list(ids[: ends[0]])
    spans = []
    for index, (position, end, image) in enumerate(zip(positions, ends[1:], images, strict=True)):
        first = 0
        for offset, length in image.runs:
            spans.append(Span(offset=len(expanded) + offset, length=length, image=index, first=first))
            first += length
        expanded += image.ids
        expanded += ids[position + 1 : end]
    return Expansion(expanded, tuple(spans))


def mrope_positions(
    length: int, spans: Sequence[Span], grids: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], int]:
    """(int64 [3, length], delta): temporal, row and column position of each token of an expanded prompt, each span
    being one whole image of grid (rows, columns). A token i after the prompt has position i + delta in all three."""
    positions_3L = np.empty((3, length), np.int64)
    done = following = 0
    for span, (rows, cols) in zip(spans, grids, strict=True):
        assert span.length == rows * cols, f"{span.length} embeddings for {rows} x {cols}"
        positions_3L[:, done : span.offset] = np.arange(following, following + span.offset - done)
        following += span.offset - done
        done = span.offset + span.length
        image_3L = positions_3L[:, span.offset : done]
        image_3L[0] = following
        image_3L[1] = following + np.arange(rows).repeat(cols)
        image_3L[2] = following + np.tile(np.arange(cols), rows)
        following += max(rows, cols)
    positions_3L[:, done:] = np.arange(following, following + length - done)
    return positions_3L, following - done
