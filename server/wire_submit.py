"""Submit messages: from a request to what is sent, pixels as frames of their own, and the way back, strictly checked.

Used by the API process (`client.py`) and the engine process (`engine.py`). No torch.
"""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace

import msgspec

from scheduler.plan import ImagePixels, ints
from scheduler.request import NO_IMAGES, Image, PromptImages, Span
from server.generation import GenerationRequest
from server.randomness import mix_seed
from server.wire import ImageHeader, Submit, WireError

KEY_BYTES = 32
MAX_NUMBER = 2**31 - 1
"""What a step plan's buffers can carry."""
_SPAN_FIELDS = 4
_AXES = 3


def submits_of(request: GenerationRequest, seq_ids: Sequence[int], deadline: float) -> list[Submit]:
    """One message for each choice, the first one leading the others; still without images."""
    leader = Submit(
        seq_id=seq_ids[0],
        prompt_ids=request.prompt_ids.tobytes(),
        sampling=request.sampling,
        priority=request.priority,
        deadline=deadline,
        cache_salt=request.cache_salt,
        leader=None,
        spans=ints([number for span in request.images.spans for number in span]).tobytes(),
        rope_positions=request.images.rope_positions.tobytes(),
        rope_delta=request.images.rope_delta,
        pooling=request.pooling,
    )
    seed = request.sampling.seed
    return [
        msgspec.structs.replace(
            leader,
            seq_id=seq_id,
            sampling=replace(request.sampling, seed=mix_seed(seed, choice)),
            leader=seq_ids[0] if choice else None,
        )
        for choice, seq_id in enumerate(seq_ids)
    ]


def with_images(
    message: Submit, images: PromptImages, brings: Collection[bytes]
) -> tuple[Submit, list[bytes | memoryview]]:
    """(the message with its images, the frames that follow it): the pixels of the keys in `brings`, each once."""
    headers = _headers_of(images, brings)
    frames = [_pixels_of(image).data for image, header in zip(images.images, headers, strict=True) if header.has_pixels]
    return msgspec.structs.replace(message, images=headers), frames


def _headers_of(images: PromptImages, brings: Collection[bytes]) -> tuple[ImageHeader, ...]:
    left = set(brings)
    headers = []
    for image in images.images:
        headers.append(_header(image, has_pixels=image.key in left))
        left.discard(image.key)
    assert not left, "a prompt can only bring its own images"
    return tuple(headers)


def _pixels_of(image: Image) -> ImagePixels:
    assert image.pixels is not None, "the gateway keeps the pixels of its live requests"
    return image.pixels


def _header(image: Image, *, has_pixels: bool) -> ImageHeader:
    pixels = _pixels_of(image)
    return ImageHeader(
        key=image.key,
        num_embeddings=image.num_embeddings,
        tiles=pixels.tiles,
        height=pixels.height,
        width=pixels.width,
        rows=pixels.rows,
        cols=pixels.cols,
        image_height=pixels.image_height,
        image_width=pixels.image_width,
        has_pixels=has_pixels,
    )


def unpack_images(message: Submit, frames: Sequence[bytes]) -> PromptImages:
    """The images of a Submit and of the frames behind it. Raises WireError where they contradict each other."""
    expected = sum(header.has_pixels for header in message.images)
    if expected != len(frames):
        raise WireError(f"{len(frames)} frames of pixels follow, {expected} were announced")
    positions = _unpack_ints(message.rope_positions, _AXES)
    if len(positions) * 4 not in (0, len(message.prompt_ids) * _AXES):
        raise WireError(f"{len(positions) // _AXES} rope positions for {len(message.prompt_ids) // 4} tokens")
    if not (message.images or message.spans or positions):
        return NO_IMAGES
    following = iter(frames)
    return PromptImages(
        images=tuple(_image(header, next(following) if header.has_pixels else None) for header in message.images),
        spans=_unpack_spans(message),
        rope_positions=positions,
        rope_delta=message.rope_delta,
    )


def _image(header: ImageHeader, data: bytes | None) -> Image:
    sizes = (header.tiles, header.height, header.width, header.image_height, header.image_width, header.num_embeddings)
    if len(header.key) != KEY_BYTES or min(sizes) < 1 or max(sizes) > MAX_NUMBER or min(header.rows, header.cols) < 0:
        raise WireError(f"no image has these sizes: {sizes}")
    num_pixels = header.tiles * header.height * header.width
    if data is not None and len(data) != num_pixels * 3:
        raise WireError(f"{len(data)} bytes are not the pixels of {header.tiles} x {header.height} x {header.width}")
    return Image(
        key=header.key,
        num_embeddings=header.num_embeddings,
        num_pixels=num_pixels,
        pixels=None if data is None else _pixels(header, data),
    )


def _pixels(header: ImageHeader, data: bytes) -> ImagePixels:
    return ImagePixels(
        data=data,
        tiles=header.tiles,
        height=header.height,
        width=header.width,
        rows=header.rows,
        cols=header.cols,
        image_height=header.image_height,
        image_width=header.image_width,
    )


def _unpack_ints(raw: bytes, width: int) -> "array[int]":
    if len(raw) % (4 * width):
        raise WireError(f"{len(raw)} bytes are not rows of {width} int32 numbers")
    numbers = array("i")
    numbers.frombytes(raw)
    return numbers


def _unpack_spans(message: Submit) -> tuple[Span, ...]:
    numbers = _unpack_ints(message.spans, _SPAN_FIELDS)
    spans = tuple(Span(*numbers[start : start + _SPAN_FIELDS]) for start in range(0, len(numbers), _SPAN_FIELDS))
    end = 0
    for span in spans:
        if not (end <= span.offset and span.length > 0 and 0 <= span.image < len(message.images)):
            raise WireError(f"{span} is out of place")
        if not 0 <= span.first <= message.images[span.image].num_embeddings - span.length:
            raise WireError(f"{span} is not within its image")
        end = span.offset + span.length
    if end * 4 > len(message.prompt_ids):
        raise WireError(f"{spans[-1]} is not within the prompt")
    return spans
