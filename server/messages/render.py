"""A generation as a message of Anthropic's Messages API: events, or one document. Used by the routes; API process."""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import msgspec

from server.api.render import collect, named_event
from server.choice import Delta
from server.dialect import anthropic_error
from server.errors import ApiError
from server.schema.messages import MessagesBody
from server.stream import Generation, Usage
from server.tools.calls import CallPart


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts the tokens that came from the cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


class MessageRenderer:
    """Events and the document of one message."""

    last = b""

    def __init__(self, body: MessagesBody, request_id: str) -> None:
        self._model, self._max_tokens, self._request_id = body.model, body.max_tokens, request_id
        self._blocks = _Blocks()

    async def chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        begun = False
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                if not begun:
                    begun = True
                    message = self._message([], generation) | {"stop_reason": None, "stop_sequence": None}
                    yield named_event("message_start", {"message": message}) + named_event("ping", {})
                yield b"".join(self._blocks.push(delta))
                if delta.finish_reason is not None:
                    end = self._end(delta.finish_reason, delta.stop_reason, generation)
                    yield b"".join(self._blocks.end())
                    yield named_event("message_delta", {"delta": end, "usage": _usage(generation.usage())})
        yield named_event("message_stop", {})

    async def document(self, generation: Generation) -> dict[str, object]:
        """The plain JSON answer."""
        (result,) = await collect(generation)
        content: list[dict[str, Any]] = []
        if result.reasoning:
            content.append({"type": "thinking", "thinking": result.reasoning, "signature": ""})
        for part in result.answer:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append({"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.arguments)})
        end = self._end(result.finish_reason, result.stop_reason, generation)
        return self._message(content, generation) | end

    def failure(self, error: ApiError) -> bytes:
        """The event that tells of an error in mid-stream."""
        return named_event("error", anthropic_error(error, self._request_id))

    def close(self) -> None:
        """Nothing is left to do."""

    def _message(self, content: list[dict[str, Any]], generation: Generation) -> dict[str, object]:
        return {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": _usage(generation.usage()),
        }

    def _end(self, finish: str | None, stop: str | int | None, generation: Generation) -> dict[str, object]:
        if finish == "length":
            is_limit = generation.usage().completion_tokens >= self._max_tokens
            return {"stop_reason": "max_tokens" if is_limit else "model_context_window_exceeded", "stop_sequence": None}
        if finish == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        is_sequence = isinstance(stop, str)
        return {
            "stop_reason": "stop_sequence" if is_sequence else "end_turn",
            "stop_sequence": stop if is_sequence else None,
        }


def _input(arguments: str) -> msgspec.Raw:
    """The arguments of a call, as they are: an object, {} where the output was cut before it was complete."""
    try:
        json.loads(arguments)
    except ValueError:
        arguments = "{}"
    return msgspec.Raw(arguments.encode())


class _Blocks:
    """The events of content blocks: one is open at a time."""

    def __init__(self) -> None:
        self._kind: str | None = None
        self._call = -1
        self._index = -1

    def push(self, delta: Delta) -> Iterator[bytes]:
        """What the delta adds."""
        if delta.reasoning:
            yield from self._open("thinking", {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        for part in delta.answer:
            if isinstance(part, str):
                yield from self._open("text", {"text": ""})
                yield self._delta({"type": "text_delta", "text": part})
            else:
                yield from self._push_call(part)

    def end(self) -> Iterator[bytes]:
        """Close the block that is open."""
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._kind is not None:
            yield named_event("content_block_stop", {"index": self._index})
        self._kind = None

    def _push_call(self, part: CallPart) -> Iterator[bytes]:
        if self._kind != "tool_use" or self._call != part.index:
            yield from self.end()
            self._call = part.index
            yield from self._open("tool_use", {"id": part.id, "name": part.name, "input": {}})
        if part.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})

    def _open(self, kind: str, fields: dict[str, Any]) -> Iterator[bytes]:
        if self._kind == kind:
            return
        yield from self.end()
        self._kind = kind
        self._index += 1
        yield named_event("content_block_start", {"index": self._index, "content_block": {"type": kind} | fields})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", {"index": self._index, "delta": delta})
