"""The output items of a response, grown from deltas: each change is an event of the stream. API process. Pure.

Used by `server/responses/render.py`, for streams and for whole answers alike, so that both say the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from server.choice import Delta
from server.tools.calls import CallPart

Event = tuple[str, dict[str, Any]]
"""Type without `response.`, and fields."""


class _TextItem:
    """A message, or reasoning: one part of text."""

    def __init__(self, output_index: int, *, is_reasoning: bool) -> None:
        self.is_reasoning = is_reasoning
        self._kind = "reasoning_text" if is_reasoning else "output_text"
        self._id = f"{'rs' if is_reasoning else 'msg'}_{uuid4().hex}"
        self._where = {"item_id": self._id, "output_index": output_index, "content_index": 0}
        self._text: list[str] = []
        self._logprobs: list[Any] = []

    def begin(self) -> Iterator[Event]:
        yield "output_item.added", self._of_item(self.document("in_progress", begun=False))
        yield "content_part.added", self._where | {"part": self._part()}

    def note(self, logprobs: Sequence[Any]) -> None:
        self._logprobs += logprobs

    def add(self, text: str, logprobs: Sequence[Any]) -> Iterator[Event]:
        self._text.append(text)
        self.note(logprobs)
        more = {} if self.is_reasoning else {"logprobs": list(logprobs)}
        yield f"{self._kind}.delta", self._where | {"delta": text} | more

    def end(self, status: str) -> Iterator[Event]:
        more = {} if self.is_reasoning else {"logprobs": self._logprobs}
        yield f"{self._kind}.done", self._where | {"text": "".join(self._text)} | more
        yield "content_part.done", self._where | {"part": self._part()}
        yield "output_item.done", self._of_item(self.document(status))

    def document(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        parts = [self._part()] if begun else []
        if self.is_reasoning:
            return {"id": self._id, "type": "reasoning", "summary": [], "content": parts, "status": status}
        return {"id": self._id, "type": "message", "role": "assistant", "content": parts, "status": status}

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._kind, "text": "".join(self._text)}
        return part if self.is_reasoning else part | {"annotations": [], "logprobs": list(self._logprobs)}

    def _of_item(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"output_index": self._where["output_index"], "item": item}


class _CallItem:
    """A call of a function."""

    def __init__(self, output_index: int, part: CallPart) -> None:
        self.index = part.index
        self._output_index, self._call_id, self._name = output_index, part.id, part.name
        self._id = f"fc_{uuid4().hex}"
        self._arguments: list[str] = []
        self.is_complete = False

    def begin(self) -> Iterator[Event]:
        yield "output_item.added", self._of_item("in_progress")

    def add(self, arguments: str) -> Iterator[Event]:
        self._arguments.append(arguments)
        where = {"item_id": self._id, "output_index": self._output_index}
        yield "function_call_arguments.delta", where | {"delta": arguments}

    def end(self, status: str) -> Iterator[Event]:
        where = {"item_id": self._id, "output_index": self._output_index, "name": self._name}
        yield "function_call_arguments.done", where | {"arguments": "".join(self._arguments)}
        yield "output_item.done", self._of_item(status)

    def document(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
            "status": status,
        }

    def _of_item(self, status: str) -> dict[str, Any]:
        return {"output_index": self._output_index, "item": self.document(status)}


class Output:
    """All items of one response."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        """Those that are complete, or were when the output ended."""
        self._open: _TextItem | _CallItem | None = None
        self._logprobs: list[Any] = []
        """Of tokens that no event has shown yet."""

    def push(self, delta: Delta, logprobs: Sequence[Any]) -> Iterator[Event]:
        """What the delta adds; `logprobs` are those of its tokens, of which the message gets all, also of marks that
        nobody sees: which of them came in one step is chance. An output always has an item."""
        self._logprobs += logprobs
        if delta.reasoning:
            yield from self._add_text(delta.reasoning, is_reasoning=True)
        is_empty = delta.finish_reason is not None and not self.items and self._open is None
        for part in delta.answer or [""] * (is_empty and not delta.reasoning):
            if isinstance(part, str):
                yield from self._add_text(part, is_reasoning=False)
            else:
                yield from self._add_call(part)
        if delta.finish_reason is not None:
            yield from self.end("incomplete" if delta.finish_reason == "length" else "completed")

    def end(self, status: str) -> Iterator[Event]:
        """Close the item that is open."""
        if self._open is not None:
            if isinstance(self._open, _TextItem) and not self._open.is_reasoning:
                self._open.note(self._take_logprobs())
            if isinstance(self._open, _CallItem):
                status = "completed" if self._open.is_complete else "incomplete"
            yield from self._open.end(status)
            self.items.append(self._open.document(status))
            self._open = None

    def _take_logprobs(self) -> list[Any]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def _add_text(self, text: str, *, is_reasoning: bool) -> Iterator[Event]:
        item = self._open
        if not isinstance(item, _TextItem) or item.is_reasoning != is_reasoning:
            yield from self.end("completed")
            self._open = item = _TextItem(len(self.items), is_reasoning=is_reasoning)
            yield from item.begin()
        if text:
            yield from item.add(text, [] if is_reasoning else self._take_logprobs())

    def _add_call(self, part: CallPart) -> Iterator[Event]:
        item = self._open
        if not isinstance(item, _CallItem) or item.index != part.index:
            yield from self.end("completed")
            self._open = item = _CallItem(len(self.items), part)
            yield from item.begin()
        item.is_complete = part.is_complete
        if part.arguments:
            yield from item.add(part.arguments)
