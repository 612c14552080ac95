"""POST /v1/chat/completions: step 1 of a request's path, and the answer in OpenAI's chat shapes. API process."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.body import read_body
from server.api.conversation import start_chat, unhonoured_by_model
from server.api.gateway import gateway_of, record_of
from server.api.logprobs import TokenNaming, chat_logprobs, prompt_logprobs
from server.api.openapi import describe
from server.api.render import (
    ChoiceResult,
    ChunkTemplate,
    Head,
    OpenAIStream,
    collect,
    json_of,
    to_json,
    usage_document,
)
from server.api.submit import answer
from server.choice import Delta
from server.prompt.tokenizer import Tokenizer
from server.schema.chat import ChatBody
from server.schema.unknown import check_unknown
from server.stream import Generation

PATH = "/v1/chat/completions"
router = APIRouter()


@router.post(PATH, openapi_extra=describe(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, as one JSON document or as a stream of chunks."""
    gateway = gateway_of(request)
    body, ignored = await read_body(request, gateway, ChatBody)
    unhonoured = unhonoured_by_model(gateway, body)
    ignored = sorted([*ignored, *check_unknown(unhonoured, strict=gateway.config.strict_params)])
    generation = await start_chat(request, gateway, body)
    body = body.model_copy(update={"messages": []})  # a stream may last, and images are megabytes
    renderer = ChatRenderer(body, record_of(request).request_id, gateway.tokenizer)
    return await answer(request, generation, renderer, stream=bool(body.stream), ignored=ignored)


class ChatRenderer(OpenAIStream):
    """Chunks and documents of one chat request."""

    def __init__(self, body: ChatBody, request_id: str, tokenizer: Tokenizer) -> None:
        self._head = Head(id=f"chatcmpl-{request_id}", created=int(time.time()), model=body.model)
        self._body = body
        self._naming = TokenNaming(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._template = ChunkTemplate("chat.completion.chunk", self._head, body)
        self._begun: set[int] = set()

    async def chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Server-sent events, without the final [DONE]."""
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                if events := self._events(delta, generation):
                    yield events
        if self._body.include_usage:
            yield self._template.usage(generation.usage())

    def _events(self, delta: Delta, generation: Generation) -> bytes:
        """The role with a choice's first token, then text, then the finish reason: each in a chunk of its own."""
        events, usage = b"", self._template.usage_field(generation)
        if delta.index not in self._begun:
            extra = self._prompt_ids(generation) if not self._begun else b""
            self._begun.add(delta.index)
            role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            events += self._template.choice(delta.index, role, extra + usage)
        ids = b',"token_ids":' + to_json(delta.token_ids) if self._body.return_token_ids else b""
        logprobs = to_json(chat_logprobs(delta.tokens, self._naming)) if self._body.logprobs else b"null"
        for piece in _pieces(delta):
            fields = b',"delta":{%b},"logprobs":%b,"finish_reason":null%b'
            events += self._template.choice(delta.index, fields % (piece, logprobs, ids), usage)
            ids, logprobs = b"", b"null"
        if delta.finish_reason is not None:
            fields = b',"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b%b'
            reasons = (to_json(self._finish_reason(delta.finish_reason)), to_json(delta.stop_reason), ids)
            events += self._template.choice(delta.index, fields % reasons, usage)
        return events

    def _finish_reason(self, reason: str | None) -> str | None:
        """A call of a function that the request named is no reason: so it is with OpenAI."""
        use = self._body.tool_use
        return "stop" if reason == "tool_calls" and use is not None and use.mode == "named" else reason

    def _prompt_ids(self, generation: Generation) -> bytes:
        if not self._body.return_token_ids:
            return b""
        return b',"prompt_token_ids":' + to_json(generation.prompt_ids(0))

    async def document(self, generation: Generation) -> dict[str, object]:
        """The plain JSON answer."""
        in_thread = bool(self._body.logprobs)
        choices = [partial(self._choice, *entry) for entry in enumerate(await collect(generation))]
        document = self._head.fields("chat.completion") | {
            "choices": [await json_of(choice, in_thread=in_thread) for choice in choices],
            "usage": usage_document(generation.usage()),
        }
        if self._body.return_token_ids:
            document["prompt_token_ids"] = generation.prompt_ids(0)
        if self._body.prompt_logprobs is not None:
            entries = partial(prompt_logprobs, generation, 0, self._body.prompt_logprobs, self._naming)
            document["prompt_logprobs"] = await json_of(entries, in_thread=True)
        return document

    def _choice(self, index: int, result: ChoiceResult) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "message": _message(result),
            "logprobs": chat_logprobs(result.tokens, self._naming) if self._body.logprobs else None,
            "finish_reason": self._finish_reason(result.finish_reason),
            "stop_reason": result.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = result.token_ids
        return choice


def _pieces(delta: Delta) -> list[bytes]:
    """The fields of `delta` in chunks that follow each other: reasoning, then content and parts of calls."""
    pieces = [b'"reasoning_content":' + to_json(delta.reasoning)] if delta.reasoning else []
    for part in delta.answer:
        if isinstance(part, str):
            pieces.append(b'"content":' + to_json(part))
            continue
        if part.id:
            begun = {"name": part.name, "arguments": ""}
            call = {"index": part.index, "id": part.id, "type": "function", "function": begun}
            pieces.append(b'"tool_calls":[%b]' % to_json(call))
        if part.arguments:
            more = {"index": part.index, "function": {"arguments": part.arguments}}
            pieces.append(b'"tool_calls":[%b]' % to_json(more))
    return pieces or [b'"content":""'] * bool(delta.tokens)


def _message(result: ChoiceResult) -> dict[str, object]:
    """`content` is null where there is something else instead."""
    text, calls = result.text, result.calls
    message: dict[str, object] = {
        "role": "assistant",
        "content": None if (result.reasoning or calls) and not text else text,
        "refusal": None,
    }
    if result.reasoning:
        message["reasoning_content"] = result.reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message
