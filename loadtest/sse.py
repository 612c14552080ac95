"""Reads the stream of an OpenAI-style completion into a `Record`. Used by `loadtest/load.py`, once per request."""

from typing import Any

import msgspec

from loadtest.record import Record

MAX_DETAIL = 200


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class SseReader:
    """Cuts a body into the data of its events. Lines end in LF or CR LF; comments are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


class CompletionReader:
    """Fills a record from the pieces of one answer, as they arrive."""

    _decoder = msgspec.json.Decoder(_Chunk)

    def __init__(self, record: Record) -> None:
        self._record, self._sse = record, SseReader()
        self._head = b""
        self._is_done = False
        self.text: list[str] = []
        """The pieces of the answer, for the next turn of a chat."""

    def on_piece(self, arrived: float, piece: bytes) -> None:
        """Some bytes of the body."""
        if len(self._head) < MAX_DETAIL:
            self._head += piece[:MAX_DETAIL]
        for data in self._sse.feed(piece):
            self._event(arrived, data)

    def finish(self, status: int) -> None:
        """The answer is whole: what kind of error is it, if it is one?"""
        record = self._record
        if status != 200:
            record.fail(f"HTTP {status}", _message(self._head))
        elif not record.error and not self._is_done:
            record.fail("broken stream", "the answer ended without [DONE]")
        elif not record.error and record.end == 0.0:
            record.fail("empty answer", "the stream had neither text nor a reason why it ended")

    def _event(self, arrived: float, data: bytes) -> None:
        if data.startswith(b"[DONE]"):
            self._is_done = True
            return
        try:
            chunk = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            self._record.fail("not a chunk", f"{error}: {data[:MAX_DETAIL]!r}")
            return
        if chunk.error:
            self._record.fail("error in stream", _message(data))
        for choice in chunk.choices or ():
            self._choice(arrived, choice)
        if chunk.usage is not None:
            self._usage(chunk.usage)

    def _choice(self, arrived: float, choice: _Choice) -> None:
        delta, record = choice.delta, self._record
        text = choice.text if delta is None else delta.content
        has_content = bool(text) or (
            delta is not None and bool(delta.reasoning_content or delta.reasoning or delta.tool_calls)
        )
        if text:
            self.text.append(text)
        if has_content:
            record.content_times.append(arrived)
        if has_content or choice.finish_reason is not None:
            record.end = arrived

    def _usage(self, usage: _Usage) -> None:
        record, details = self._record, usage.prompt_tokens_details
        record.has_usage = True
        record.input_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
        record.cached_tokens = (details.cached_tokens or 0) if details is not None else 0


def _message(body: bytes) -> str:
    """The words of an error body in any of the shapes that servers use."""
    text = body.decode(errors="replace")
    try:
        error = msgspec.json.decode(body)
        error = error.get("error", error)
        text = error["message"] if isinstance(error, dict) else error
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError, KeyError):
        return text[:MAX_DETAIL]
    return str(text)[:MAX_DETAIL]
