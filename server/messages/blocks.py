"""Anthropic's messages and their blocks as chat messages. Used by `server/messages/translate.py`; API process. Pure.

Results of tools are blocks of a user's message there and messages of their own here. Messages of one role that follow
each other are one turn.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import BadRequest
from server.schema.messages import AnthropicMessage

Block = Mapping[str, Any]


def chat_messages(messages: Sequence[AnthropicMessage], system: str | Sequence[Block] | None) -> list[dict[str, Any]]:
    """The conversation. Raises BadRequest that names the block."""
    translation = _Translation()
    if system:
        parts = [_text(block, f"system[{index}]") for index, block in enumerate(_blocks(system))]
        translation.other({"role": "system", "content": _joined(parts)})
    take = {"user": translation.user, "assistant": translation.assistant, "system": translation.system}
    for number, message in enumerate(messages):
        for index, block in enumerate(_blocks(message.content)):
            take[message.role](block, f"messages[{number}].content[{index}]")
        if not message.content and message.role == "assistant":
            translation.assistant({"type": "text", "text": ""}, f"messages[{number}].content")
    return translation.messages


def _blocks(content: str | Sequence[Block]) -> Sequence[Block]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Translation:
    """Grows the last message while blocks of its role come."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def other(self, message: dict[str, Any]) -> dict[str, Any]:
        self.messages.append(message)
        return message

    def _last(self, role: str, empty: object) -> dict[str, Any]:
        if self.messages and self.messages[-1]["role"] == role:
            return self.messages[-1]
        return self.other({"role": role, "content": empty})

    def system(self, block: Block, where: str) -> None:
        self.other({"role": "system", "content": _text(block, where)["text"]})

    def user(self, block: Block, where: str) -> None:
        if block.get("type") != "tool_result":
            self._last("user", [])["content"].append(_part(block, where))
            return
        content = block.get("content")
        parts = [_part(inner, f"{where}.content[{index}]") for index, inner in enumerate(_inner(content, where))]
        call_id = _string(block.get("tool_use_id"), f"{where}.tool_use_id")
        self.other({"role": "tool", "tool_call_id": call_id, "content": _joined(parts)})

    def assistant(self, block: Block, where: str) -> None:
        message = self._last("assistant", "")
        kind = block.get("type")
        if kind == "text":
            message["content"] += _string(block.get("text"), f"{where}.text")
        elif kind == "thinking":
            text = _string(block.get("thinking"), f"{where}.thinking")
            message["reasoning_content"] = message.get("reasoning_content", "") + text
        elif kind == "tool_use":
            given = block.get("input")
            if not isinstance(given, Mapping):
                raise BadRequest(f"{where}.input must be an object.", param="messages")
            function = {
                "name": _string(block.get("name"), f"{where}.name"),
                "arguments": json.dumps(given, ensure_ascii=False),
            }
            call = {"id": _string(block.get("id"), f"{where}.id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":  # which nobody here can read
            raise _unknown(kind, where)


def _inner(content: object, where: str) -> Sequence[Block]:
    if content is None:
        return ()
    if isinstance(content, str):
        return _blocks(content)
    if isinstance(content, list) and all(isinstance(block, Mapping) for block in content):
        return content
    raise BadRequest(f"{where}.content must be a string or a list of blocks.", param="messages")


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A text alone is a string."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _part(block: Block, where: str) -> dict[str, Any]:
    if block.get("type") == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(block.get("source"), f"{where}.source")}}
    return _text(block, where)


def _image_url(source: object, where: str) -> str:
    if isinstance(source, Mapping) and source.get("type") == "base64":
        media_type = _string(source.get("media_type"), f"{where}.media_type")
        return f"data:{media_type};base64,{_string(source.get('data'), f'{where}.data')}"
    if isinstance(source, Mapping) and source.get("type") == "url":
        return _string(source.get("url"), f"{where}.url")
    raise BadRequest(f"{where} must be of type base64 or url.", param="messages")


def _text(block: Block, where: str) -> dict[str, Any]:
    if block.get("type") != "text":
        raise _unknown(block.get("type"), where)
    return {"type": "text", "text": _string(block.get("text"), f"{where}.text")}


def _unknown(kind: object, where: str) -> BadRequest:
    return BadRequest(f"{where}: blocks of type {str(kind)[:64]!r} are not supported.", param="messages")


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where} must be a string.", param="messages")
    return value
