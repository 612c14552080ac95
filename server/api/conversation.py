"""Messages to a prompt, images included, and a checked conversation to a running generation. API process.

What the routes have in common that take a conversation, whatever API they speak.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace

from fastapi import Request

from server.api.disconnect import while_connected
from server.api.gateway import Gateway, admission_of, held_body_of, record_of
from server.api.submit import Prepared, checked_grammar, start
from server.errors import DeadlineExceeded
from server.generation import Admission
from server.images import PreparedImage
from server.prompt.build import PromptBuilder
from server.prompt.fit import chat_that_fits
from server.prompt.images import ChatPrompt
from server.prompt.messages import image_urls
from server.prompt.options import ChatOptions, keep_last
from server.schema.chat import ChatBody, Message
from server.schema.tokens import TokenizeBody
from server.stream import Generation


async def start_chat(request: Request, gateway: Gateway, body: ChatBody, *, drop_oldest: bool = False) -> Generation:
    """The answer to a conversation begins; with `drop_oldest`, to as many of its last turns as fit. Raises ApiError."""
    admission = admission_of(request)
    prompt = await prompt_of_chat(request, gateway, body, admission, drop_oldest=drop_oldest)
    shows_reasoning = body.include_reasoning is not False
    form, wanted = gateway.forms.of(
        body.tool_use, body.grammar, is_reasoning=prompt.is_reasoning, shows_reasoning=shows_reasoning
    )
    grammar = await checked_grammar(gateway, wanted)
    body = body.model_copy(update={"messages": []})  # a stream may last, and images are megabytes
    held_body_of(request).release()
    prepared = Prepared(ids=prompt.ids, images=prompt.images, form=form)
    return start(gateway, record_of(request), body, [prepared], admission, grammar)


def unhonoured_by_model(gateway: Gateway, body: ChatBody) -> dict[str, object]:
    """Parameters that are accepted and change nothing, with this model. Raises BadRequest for tools at odds."""
    body.check_tools()
    unhonoured = body.unhonoured_reasoning(gateway.prompts.variables)
    if gateway.prompts.reasoning is None and body.reasoning_effort == "none":
        unhonoured.pop("reasoning_effort", None)
    use = body.tool_use
    is_strict = use is not None and use.strict and use.mode == "auto" and body.grammar is None
    if is_strict and not gateway.forms.follows_schemas:
        unhonoured["tools.function.strict"] = True
    return unhonoured


async def prompt_of_chat(
    request: Request, gateway: Gateway, body: ChatBody, admission: Admission | None, *, drop_oldest: bool = False
) -> ChatPrompt:
    """The prompt of a chat request, which is checked first. Raises ApiError."""
    body.check_together(gateway.config.max_sequences_per_request)
    gateway.check_model(body.model)
    limit = gateway.engine.info.max_model_len
    options = replace(
        options_of(gateway, body),
        keep_last=keep_last(body.truncate_prompt_tokens, limit, max(1, body.token_limit or 1)),
        drop_oldest=drop_oldest,
    )
    return await prompt_of(request, gateway, body.messages, admission, options, cache_salt=body.salt)


def options_of(gateway: Gateway, body: ChatBody | TokenizeBody) -> ChatOptions:
    """What the fields say about how messages become a prompt."""
    variables = body.reasoning_variables(gateway.prompts.variables)
    return ChatOptions(
        add_generation_prompt=body.ends_with_answer,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        variables=variables | (body.chat_template_kwargs or {}),
        tools=body.shown_tools,
    )


async def prompt_of(
    request: Request,
    gateway: Gateway,
    messages: Sequence[Message],
    admission: Admission | None,
    options: ChatOptions,
    *,
    cache_salt: bytes = b"",
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
    build = chat_that_fits if options.drop_oldest else PromptBuilder.chat
    return await build(
        gateway.prompts,
        plain,
        images,
        max_model_len=gateway.engine.info.max_model_len,
        options=options,
    )


async def _in_time(place: Admission, work: Awaitable[Sequence[PreparedImage]]) -> Sequence[PreparedImage]:
    """Images that are fetched, decoded and resized while the client is there and the request has time."""
    try:
        async with asyncio.timeout(place.deadline - time.monotonic()):
            return await work
    except TimeoutError:
        raise DeadlineExceeded("The request's time was over before its images were ready.") from None
