"""Images in a prompt: the tokens that stand for them, where they stand, and the positions that M-RoPE gives them.

Part of step 2 of a request's path. Used by `server/prompt/build.py`; API process. A placeholder is where the template
wrote one: in a rendered prompt the placeholder's id is the template's own, since the breaker keeps users' text from
becoming it (`server/prompt/special.py`).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from scheduler.plan import ints
from scheduler.request import NO_IMAGES, Image, PromptImages, Span
from server.errors import BadRequest, context_overflow
from server.images import PreparedImage
from server.prompt.tokenizer import Tokenizer
from vision.config import Preprocessor
from vision.placeholders import (
    Expansion,
    ImageTokens,
    Patches,
    PlaceholderMismatch,
    expand,
    image_tokens,
    mrope_positions,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation as the engine takes it."""

    ids: "array[int]"
    """int32, fewer than max_model_len."""
    images: PromptImages = NO_IMAGES
    is_reasoning: bool = False
    """It ends inside the model's reasoning."""


class ImageMarkup:
    """A model's tokens for images. Immutable."""

    def __init__(self, preprocessor: Preprocessor, tokenizer: Tokenizer) -> None:
        """The placeholder must be a special token of the tokenizer (`image_source.load_tokenizer_for` sees to it)."""
        assert tokenizer.is_special(preprocessor.placeholder_id), "users' text could become a placeholder"
        self._preprocessor, self._tokenizer = preprocessor, tokenizer
        self.literal = tokenizer.token_text(preprocessor.placeholder_id)
        """The placeholder as a template writes it."""

    def surround(self, rendered: str) -> str:
        """The prompt's text with what the model wants around each of the template's placeholders."""
        before, after = self._preprocessor.around
        return rendered.replace(self.literal, before + self.literal + after) if before or after else rendered

    def place(
        self, ids: "array[int]", images: Sequence[PreparedImage], max_model_len: int, keep_last: int | None = None
    ) -> ChatPrompt:
        """The prompt with each placeholder replaced by the tokens of its image, in order, then its last `keep_last`
        tokens. Raises BadRequest when there are more or fewer placeholders than images, when the prompt would leave no
        room for an answer, or when an image would be cut."""
        markup = self._preprocessor.for_images(len(images)).markup
        all_pieces = [markup.pieces(image.layout) for image in images]
        counts = [sum(piece for piece in pieces if isinstance(piece, int)) for pieces in all_pieces]
        least = sum(counts) if keep_last else len(ids) - len(images) + sum(counts)
        if least >= max_model_len:  # before so many ids are made
            raise context_overflow(least, max_model_len)
        encode = cache(self._encode)  # the end of a row is one of hundreds
        tokens = [image_tokens(pieces, self._preprocessor.image_token_id, encode) for pieces in all_pieces]
        expansion = self._expand(ids, tokens, keep_last)
        if len(expansion.ids) >= max_model_len:
            raise context_overflow(len(expansion.ids), max_model_len)
        positions, delta = ints(), 0
        if self._preprocessor.has_mrope:
            assert isinstance(markup, Patches), "rows and columns of embeddings are those of patches"
            positions, delta = _rope_positions(expansion, [markup.grid(image.layout) for image in images])
        return ChatPrompt(
            ids=ints(expansion.ids),
            images=PromptImages(
                images=tuple(_image(image, count) for image, count in zip(images, counts, strict=True)),
                spans=tuple(Span(span.offset, span.length, span.image, span.first) for span in expansion.spans),
                rope_positions=positions,
                rope_delta=delta,
            ),
        )

    def _expand(self, ids: "array[int]", tokens: Sequence[ImageTokens], keep_last: int | None) -> Expansion:
        """Tokens are cut off before images take their places, so that offsets and positions are those of what stays."""
        places = [place for place, token in enumerate(ids) if token == self._preprocessor.placeholder_id]
        length = len(ids) + sum(len(image.ids) - 1 for image in tokens)
        cut = 0 if keep_last is None else max(0, length - keep_last)
        if places and cut > places[0]:
            raise BadRequest(
                f"truncate_prompt_tokens would cut an image: the prompt has {length} tokens, of which the first image "
                f"begins at {places[0]}.",
                param="truncate_prompt_tokens",
            )
        try:
            return expand(ids[cut:], [place - cut for place in places], tokens)
        except PlaceholderMismatch as error:
            message = f"With this model's chat template {error}."
            raise BadRequest(message, param="messages", code=error.kind) from None

    def _encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, allow_special=True)


def _image(image: PreparedImage, num_embeddings: int) -> Image:
    return Image(key=image.key, num_embeddings=num_embeddings, num_pixels=image.pixels.num_pixels, pixels=image.pixels)


def _rope_positions(expansion: Expansion, grids: Sequence[tuple[int, int]]) -> "tuple[array[int], int]":
    """(int32 [L, 3], delta)"""
    positions_3L, delta = mrope_positions(len(expansion.ids), expansion.spans, grids)
    flat = ints()
    flat.frombytes(np.ascontiguousarray(positions_3L.T, dtype=np.int32).tobytes())
    return flat, delta
