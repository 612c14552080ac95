"""/v1/responses: OpenAI's Responses API, translated into chat requests. API process; installed by `server/app.py`."""

from dataclasses import dataclass
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.body import read_body
from server.api.conversation import prompt_of_chat, start_chat
from server.api.gateway import Gateway, gateway_of, tenant_of
from server.api.logprobs import TokenNaming
from server.api.openapi import describe
from server.api.render import json_response
from server.api.submit import answer
from server.api.tokens import count_document
from server.api.translated import checked_chat, errors_about, refuse_chat_parameters
from server.errors import BadRequest
from server.responses.background import BackgroundWork
from server.responses.document import new_response
from server.responses.input import Item, input_items
from server.responses.keeper import Keeper
from server.responses.listing import listing
from server.responses.render import ResponseRenderer
from server.responses.translate import NAMES, to_chat
from server.schema.chat import ChatBody
from server.schema.responses import CountBody, ResponsesBody
from server.stream import Generation

PATH = "/v1/responses"
ONE = PATH + "/{response_id}"
router = APIRouter()

Body = TypeVar("Body", bound=CountBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """A response that is being made, without the request's body: a stream may last, and images are megabytes."""

    generation: Generation
    renderer: ResponseRenderer
    keeper: Keeper
    is_stream: bool
    is_background: bool
    ignored: list[str]


@router.post(PATH, openapi_extra=describe(ResponsesBody))
async def create(request: Request) -> Response:
    """Answer a conversation of items: as one JSON document, as a stream of events, or later."""
    started = await _start(request)
    if started.is_background:
        keeper = started.keeper
        assert keeper.stored is not None, "what is made in the background is kept"
        keeper.is_known = True
        keeper.stored.work = BackgroundWork(started.generation, started.renderer)
        return json_response(keeper.document, started.ignored)
    return await answer(
        request, started.generation, started.renderer, stream=started.is_stream, ignored=started.ignored
    )


async def _start(request: Request) -> _Started:
    gateway = gateway_of(request)
    body, items, chat, ignored = await _read(request, gateway, ResponsesBody)
    with errors_about(NAMES):
        keeper = Keeper(gateway.responses if body.keeps else None, tenant_of(request), new_response(body), items)
        naming = TokenNaming(gateway.tokenizer, as_ids=False)
        renderer = ResponseRenderer(keeper, naming, wants_logprobs=body.wants_logprobs)
        try:
            generation = await start_chat(request, gateway, chat, drop_oldest=body.truncation == "auto")
        except BaseException:
            renderer.close()
            raise
    return _Started(
        generation=generation,
        renderer=renderer,
        keeper=keeper,
        is_stream=bool(body.stream),
        is_background=bool(body.background),
        ignored=ignored,
    )


async def _read(request: Request, gateway: Gateway, schema: type[Body]) -> tuple[Body, list[Item], ChatBody, list[str]]:
    """(the body, all items of the conversation, the chat request, names of ignored parameters). Raises ApiError."""
    body, ignored = await read_body(request, gateway, schema)
    refuse_chat_parameters(body)
    body.check_together()
    items, first = _conversation(request, gateway, body)
    with errors_about(NAMES):
        chat, more = checked_chat(gateway, to_chat(body, items, first=first), NAMES)
    return body, items, chat, sorted({*ignored, *more})


def _conversation(request: Request, gateway: Gateway, body: CountBody) -> tuple[list[Item], int]:
    """(all items, how many of them come from earlier requests). Raises NotFound, or BadRequest for a response that is
    not finished."""
    own = input_items(body.input)
    if body.previous_response_id is None:
        return own, 0
    before = gateway.responses.get(tenant_of(request), body.previous_response_id, param="previous_response_id")
    if before.is_running:
        raise BadRequest("The previous response is still being worked on.", param="previous_response_id")
    earlier = [*before.items, *before.document["output"]]
    return [*earlier, *own], len(earlier)


@router.post(PATH + "/input_tokens", openapi_extra=describe(CountBody))
async def input_tokens(request: Request) -> Response:
    """How many tokens the prompt of a response would have, images included."""
    gateway = gateway_of(request)
    body, _, chat, ignored = await _read(request, gateway, CountBody)
    with errors_about(NAMES):
        prompt = await prompt_of_chat(request, gateway, chat, None, drop_oldest=body.truncation == "auto")
    return json_response(count_document(len(prompt.ids)), ignored)


@router.get(ONE)
async def retrieve(request: Request, response_id: str) -> Response:
    """A response that was kept."""
    if request.query_params.get("stream", "false") not in ("false", "0"):
        raise BadRequest("A kept response is not streamed.", param="stream")
    stored = gateway_of(request).responses.get(tenant_of(request), response_id)
    return json_response(stored.document, [])


@router.delete(ONE)
async def delete(request: Request, response_id: str) -> Response:
    """Keep it no longer."""
    gateway_of(request).responses.delete(tenant_of(request), response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True}, [])


@router.post(ONE + "/cancel")
async def cancel(request: Request, response_id: str) -> Response:
    """End what is made in the background. Nothing happens to one that has ended."""
    stored = gateway_of(request).responses.get(tenant_of(request), response_id)
    if stored.work is None:
        raise BadRequest("Only responses created with background=true can be cancelled.", param="response_id")
    await stored.work.cancel()
    return json_response(stored.document, [])


@router.get(ONE + "/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """What the response answers, earlier turns included."""
    stored = gateway_of(request).responses.get(tenant_of(request), response_id)
    return json_response(listing(stored.items, request.query_params), [])
