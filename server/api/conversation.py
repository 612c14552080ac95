"""Messages to a prompt, images included: what chat completions and /tokenize have in common. API process."""

import asyncio
import time
from collections.abc import Awaitable, Sequence

from fastapi import Request

from server.api.disconnect import while_connected
from server.api.gateway import Gateway, record_of
from server.errors import DeadlineExceeded
from server.generation import Admission
from server.images import PreparedImage
from server.prompt.images import ChatPrompt
from server.prompt.messages import image_urls
from server.schema.chat import Message


async def prompt_of(
    request: Request,
    gateway: Gateway,
    messages: Sequence[Message],
    admission: Admission | None,
    *,
    cache_salt: bytes = b"",
    add_generation_prompt: bool = True,
) -> ChatPrompt:
    """The prompt of a conversation. Without an admission of the request's own, its images take one. Raises ApiError."""
    plain = [message.model_dump(exclude_none=True) for message in messages]
    urls = image_urls(plain)
    images: Sequence[PreparedImage] = ()
    if urls and gateway.images is not None:
        place = admission or gateway.engine.admit()
        try:
            work = gateway.images.prepare(urls, cache_salt)
            images = await _in_time(place, while_connected(request.receive, record_of(request), work))
        finally:
            if admission is None:
                place.release()
        gateway.metrics.count_images(len(images))
    return await gateway.prompts.chat(
        plain,
        images,
        max_model_len=gateway.engine.info.max_model_len,
        add_generation_prompt=add_generation_prompt,
    )


async def _in_time(place: Admission, work: Awaitable[Sequence[PreparedImage]]) -> Sequence[PreparedImage]:
    """Images that are fetched, decoded and resized while the client is there and the request has time."""
    try:
        async with asyncio.timeout(place.deadline - time.monotonic()):
            return await work
    except TimeoutError:
        raise DeadlineExceeded("The request's time was over before its images were ready.") from None
