"""What the renderers of all APIs share: JSON, events, usage, whole results, and chunks cut from a template.

Used by the generation routes; API process. A chunk is a constant head with a few spliced values: building and
serializing a model for each token costs many times more.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from server.choice import TextToken
from server.errors import ApiError
from server.schema.common import GenerationBody
from server.schema.unknown import ignored_header
from server.stream import Generation, Usage
from server.tools.calls import AnswerPart

_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""What JSON leaves unescaped and readers that split a stream with Unicode's rules (httpx's `iter_lines`) take for the
end of a line: NEL, line separator and paragraph separator."""


def to_json(value: object) -> bytes:
    """JSON on a single line, by everybody's idea of a line."""
    encoded = msgspec.json.encode(value)
    if not encoded.isascii():
        for raw, escaped in _LINE_ENDS:
            encoded = encoded.replace(raw, escaped)
    return encoded


def json_response(document: dict[str, object], ignored: list[str]) -> Response:
    """A plain answer; `ignored` are the names of parameters that had no effect."""
    return Response(to_json(document), media_type="application/json", headers=ignored_header(ignored))


async def json_of(make: Callable[[], object], *, in_thread: bool) -> msgspec.Raw:
    """What `make` gives, as JSON. Something for each token, such as log-probabilities, may be so many objects that the
    event loop must not wait for them, nor memory hold those of all choices."""
    return await asyncio.to_thread(_raw, make) if in_thread else _raw(make)


def _raw(make: Callable[[], object]) -> msgspec.Raw:
    return msgspec.Raw(to_json(make()))


def named_event(kind: str, fields: dict[str, Any]) -> bytes:
    """A server-sent event with a name, which its document has as its type."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind} | fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fields that all chunks of an answer, or the answer itself, begin with."""

    id: str
    created: int
    model: str
    """As the client called it."""

    def fields(self, kind: str) -> dict[str, object]:
        """As they are written, in an answer that is an object of that kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


@dataclass(slots=True)
class Call:
    """One tool call; its arguments are JSON, not all of it where the output was cut."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChoiceResult:
    """One whole choice."""

    reasoning: str = ""
    answer: list[str | Call] = field(default_factory=list)
    """Content and calls in the order of the output, no two texts side by side."""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TextToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """Content alone."""
        return "".join(part for part in self.answer if isinstance(part, str))

    @property
    def calls(self) -> list[Call]:
        """Calls alone."""
        return [part for part in self.answer if not isinstance(part, str)]


class Renderer(Protocol):
    """Turns a generation into the answer of one API."""

    @property
    def last(self) -> bytes:
        """The event that ends every stream which still has a reader; b"" for none."""
        ...

    def chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Server-sent events, without the last."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The events that tell of an error in mid-stream."""
        ...

    def close(self) -> None:
        """Called when the answer has ended, however it has. Idempotent."""
        ...

    async def document(self, generation: Generation) -> dict[str, object]:
        """The plain JSON answer."""
        ...


class OpenAIStream:
    """How streams of chunks end, on error and otherwise."""

    last = b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """The event that tells of an error in mid-stream."""
        return b"data: " + to_json(error.body()) + b"\n\n"

    def close(self) -> None:
        """Nothing is left to do."""


async def collect(generation: Generation) -> list[ChoiceResult]:
    """All choices, in the order of their index. Raises ApiError when one of them fails."""
    results = [ChoiceResult() for _ in range(generation.num_choices)]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            result = results[delta.index]
            result.reasoning += delta.reasoning
            for part in delta.answer:
                _collect(result.answer, part)
            result.token_ids += delta.token_ids
            result.tokens += delta.tokens
            if delta.finish_reason is not None:
                result.finish_reason, result.stop_reason = delta.finish_reason, delta.stop_reason
    return results


def _collect(answer: list[str | Call], part: AnswerPart) -> None:
    last = answer[-1] if answer else None
    if isinstance(part, str):
        if isinstance(last, str):
            answer[-1] = last + part
        else:
            answer.append(part)
        return
    if part.id:
        answer.append(last := Call(part.id, part.name))
    assert isinstance(last, Call), "pieces of a call come one after the other"
    last.arguments += part.arguments


def usage_document(usage: Usage) -> dict[str, object]:
    """OpenAI's `usage` object; with the tokens of images, of reasoning and of drafts where there are any."""
    images = {"image_tokens": usage.image_tokens} if usage.image_tokens else {}
    details = {"reasoning_tokens": usage.reasoning_tokens} if usage.reasoning_tokens else {}
    if usage.draft_tokens:
        details["accepted_prediction_tokens"] = usage.accepted_tokens
        details["rejected_prediction_tokens"] = usage.draft_tokens - usage.accepted_tokens
    document: dict[str, object] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} | images,
    }
    return document | ({"completion_tokens_details": details} if details else {})


class ChunkTemplate:
    """The constant parts of the chunks of one stream."""

    def __init__(self, object_name: str, head: Head, body: GenerationBody) -> None:
        self._start = b"data: " + to_json(head.fields(object_name))[:-1]
        self._usage_field = b',"usage":null' if body.include_usage else b""
        self._is_continuous = body.continuous_usage

    def usage_field(self, generation: Generation) -> bytes:
        """For the chunks of the next delta."""
        if not self._is_continuous:
            return self._usage_field
        return b',"usage":' + to_json(usage_document(generation.usage()))

    def choice(self, index: int, fields: bytes, extra: bytes) -> bytes:
        """The chunk of one choice. `fields` (of the choice) and `extra` (of the chunk) begin with a comma."""
        return b'%b,"choices":[{"index":%d%b}]%b}\n\n' % (self._start, index, fields, extra)

    def usage(self, usage: Usage) -> bytes:
        """The last chunk of a stream whose client asked for usage."""
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._start, to_json(usage_document(usage)))
