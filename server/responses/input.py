"""The items of the Responses API as chat messages. Used by `server/responses/translate.py`; API process. Pure.

An answer is several items there (reasoning, message, calls) and one message here, so items of the assistant that follow
each other are put together.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from server.errors import BadRequest

Item = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type -> the field with its text."""
_DETAILS = ("auto", "low", "high")


def input_items(given: str | Sequence[Item] | None) -> list[Item]:
    """The request's own items as they are kept: each with a type and an id, a text as a part of a message."""
    if given is None:
        return []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_complete(item) for item in items]


def _complete(item: Item) -> Item:
    kind = item.get("type", "message")
    kept = {**item, "type": kind, "id": item.get("id") or f"{str(kind)[:3]}_{uuid4().hex}"}
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        kept["content"] = [{"type": part, "text": content} | ({"annotations": []} if part == "output_text" else {})]
    return kept


def chat_messages(items: Sequence[Item], *, first: int) -> list[dict[str, object]]:
    """The conversation of all items; `first` is the number of those that came with earlier requests. Raises BadRequest
    that names the item."""
    translation = _Translation()
    for index, item in enumerate(items):
        translation.take(item, f"input[{index - first}]")
    return translation.messages


class _Translation:
    def __init__(self) -> None:
        self.messages: list[dict[str, object]] = []
        self._answer: dict[str, Any] | None = None
        """The assistant's message that further items may belong to; the last of `messages`."""

    def take(self, item: Item, where: str) -> None:
        kind = item.get("type")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            content = _content(item.get("output"), f"{where}.output")
            call_id = _string(item.get("call_id"), f"{where}.call_id")
            self._other({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            raise BadRequest(f"{where}: items of type {str(kind)[:64]!r} are not supported.", param="input")

    def _other(self, message: dict[str, object]) -> None:
        self._answer = None
        self.messages.append(message)

    def _answer_without(self, *fields: str) -> dict[str, Any]:
        """The assistant's message, a new one when it has one of the fields already."""
        if self._answer is None or any(self._answer.get(field) for field in fields):
            self._answer = {"role": "assistant", "content": None}
            self.messages.append(self._answer)
        return self._answer

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", param="input")
        content = _content(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._answer_without("content", "tool_calls")["content"] = content
        else:
            self._other({"role": role, "content": content})

    def _reasoning(self, item: Item, where: str) -> None:
        """Only what is there in words: what was encrypted elsewhere cannot be read."""
        content = item.get("content") or []
        if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
            raise BadRequest(f"{where}.content must be a list of parts.", param="input")
        texts = [_string(part.get("text"), f"{where}.content: text") for part in content]
        if texts:
            self._answer_without("content", "tool_calls", "reasoning_content")["reasoning_content"] = "\n".join(texts)

    def _call(self, item: Item, where: str) -> None:
        call = {
            "id": _string(item.get("call_id"), f"{where}.call_id"),
            "type": "function",
            "function": {
                "name": _string(item.get("name"), f"{where}.name"),
                "arguments": _string(item.get("arguments"), f"{where}.arguments"),
            },
        }
        self._answer_without().setdefault("tool_calls", []).append(call)


def _content(content: object, where: str) -> str | list[dict[str, object]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or a list of parts.", param="input")
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if len(parts) == 1 and isinstance(text := parts[0].get("text"), str):
        return text
    return parts


def _part(part: object, where: str) -> dict[str, object]:
    if not isinstance(part, Mapping):
        raise BadRequest(f"{where} must be an object with a type.", param="input")
    kind = part.get("type")
    if isinstance(kind, str) and (field := _TEXT_PARTS.get(kind)) is not None:
        return {"type": "text", "text": _string(part.get(field), f"{where}.{field}")}
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise BadRequest(f"{where}.file_id is not supported; give the image in image_url.", param="input")
        detail = part.get("detail", "auto")
        url = _string(part.get("image_url"), f"{where}.image_url")
        return {"type": "image_url", "image_url": {"url": url, "detail": detail if detail in _DETAILS else "auto"}}
    raise BadRequest(f"{where}: parts of type {str(kind)[:64]!r} are not supported.", param="input")


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where} must be a string.", param="input")
    return value
