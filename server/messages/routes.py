"""/v1/messages: Anthropic's Messages API, translated into chat requests. API process; installed by `server/app.py`."""

from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.body import read_body
from server.api.conversation import prompt_of_chat, start_chat
from server.api.gateway import Gateway, gateway_of, record_of
from server.api.openapi import describe
from server.api.render import json_response
from server.api.submit import answer
from server.api.translated import checked_chat, refuse_chat_parameters
from server.dialect import ANTHROPIC
from server.messages.render import MessageRenderer
from server.messages.translate import NAMES, to_chat
from server.schema.chat import ChatBody
from server.schema.messages import CountTokensBody, MessagesBody
from server.stream import Generation

PATH = ANTHROPIC
router = APIRouter()

Body = TypeVar("Body", bound=CountTokensBody)


@router.post(PATH, openapi_extra=describe(MessagesBody))
async def create(request: Request) -> Response:
    """Answer a conversation, as one JSON document or as a stream of events."""
    generation, renderer, is_stream, ignored = await _start(request)
    return await answer(request, generation, renderer, stream=is_stream, ignored=ignored)


async def _start(request: Request) -> tuple[Generation, MessageRenderer, bool, list[str]]:
    """A message that is being made, without the request's body: a stream may last, and images are megabytes."""
    gateway = gateway_of(request)
    body, chat, ignored = await _read(request, gateway, MessagesBody)
    generation = await start_chat(request, gateway, chat)
    renderer = MessageRenderer(body, record_of(request).request_id)
    return generation, renderer, bool(body.stream), ignored


async def _read(request: Request, gateway: Gateway, schema: type[Body]) -> tuple[Body, ChatBody, list[str]]:
    """(the body, the chat request, names of ignored parameters). Raises ApiError."""
    body, ignored = await read_body(request, gateway, schema)
    refuse_chat_parameters(body)
    body.check_together()
    chat, more = checked_chat(gateway, to_chat(body), NAMES)
    return body, chat, sorted({*ignored, *more})


@router.post(PATH + "/count_tokens", openapi_extra=describe(CountTokensBody))
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a message would have, images included."""
    gateway = gateway_of(request)
    _, chat, ignored = await _read(request, gateway, CountTokensBody)
    prompt = await prompt_of_chat(request, gateway, chat, None)
    return json_response({"input_tokens": len(prompt.ids)}, ignored)
