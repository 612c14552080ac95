"""Messages to a prompt, images included: what chat completions and /tokenize have in common. API process."""

from collections.abc import Sequence

from fastapi import Request

from server.api.disconnect import while_connected
from server.api.gateway import Gateway, record_of
from server.images import PreparedImage
from server.prompt.images import ChatPrompt
from server.prompt.messages import image_urls
from server.schema.chat import Message


async def prompt_of(
    request: Request,
    gateway: Gateway,
    messages: Sequence[Message],
    *,
    cache_salt: bytes = b"",
    add_generation_prompt: bool = True,
) -> ChatPrompt:
    """The prompt of a conversation; its images are fetched, decoded and resized while the client is there. Raises
    ApiError."""
    plain = [message.model_dump(exclude_none=True) for message in messages]
    urls = image_urls(plain)
    images: Sequence[PreparedImage] = ()
    if urls and gateway.images is not None:
        work = gateway.images.prepare(urls, cache_salt)
        images = await while_connected(request.receive, record_of(request), work)
        gateway.metrics.count_images(len(images))
    return await gateway.prompts.chat(
        plain,
        images,
        max_model_len=gateway.engine.info.max_model_len,
        add_generation_prompt=add_generation_prompt,
    )
