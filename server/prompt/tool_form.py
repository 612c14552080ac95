"""How a chat template takes tools and calls, and conversations arranged accordingly. Used by `server/prompt/build.py`.

API process. Pure. What a template does with them is found by trying it (`probe`): some want a call's arguments as text,
some show calls only where the content is null, Mistral's refuse ids that are not nine letters and digits, and many know
nothing of tools. For those the tools are explained in words, and calls and their results become text.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias

Plain: TypeAlias = dict[str, Any]
"""A message as templates take it."""
Attempt: TypeAlias = Callable[[list[Plain], list[Plain] | None], str]
"""The prompt of messages and tools; "" where the template fails on them."""
IdStyle: TypeAlias = Literal["given", "short", "kimi"]

SHORT_ID_CHARS = 9
_TOOL = "probe_tool"
_KEY, _VALUE = "probe_key", "probe_value"
_IDS: tuple[tuple[IdStyle, str], ...] = (("given", "call_probe"), ("short", "a1b2c3d4e"))
_KIMI_IDS: tuple[tuple[IdStyle, str], ...] = (("kimi", f"functions.{_TOOL}:0"),)
_KIMI_MARK = "<|tool_call_begin|>"
"""In the templates of models that learned from ids of one form only."""

_INTRODUCTION = "You may call functions. Each line describes one as JSON:"
_RULE = (
    "To call functions, answer with nothing but a line of JSON for each call, such as "
    '{"name": "FUNCTION", "arguments": {"PARAMETER": "VALUE"}}. Else answer in words.'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """What a template does with tools."""

    shows_tools: bool = False
    shows_calls: bool = False
    text_arguments: bool = False
    """A call's arguments must be JSON text; else they must be an object."""
    null_content: bool = False
    """A message with calls must have null for empty content."""
    ids: IdStyle = "given"
    """How the template, or the model behind it, wants the ids of calls."""


def probe(attempt: Attempt, source: str, *, takes_parts: bool) -> ToolForm:
    """Try the template, whose text is `source`."""

    def content(text: str) -> object:
        return [{"type": "text", "text": text}] if takes_parts else text

    user: Plain = {"role": "user", "content": content("probe")}
    schema = {"type": "object", "properties": {_KEY: {"type": "string", "description": "-"}}, "required": [_KEY]}
    tool = {"type": "function", "function": {"name": _TOOL, "description": "-", "parameters": schema}}
    shows_tools = _TOOL in attempt([user], [tool])
    styles = _KIMI_IDS if _KIMI_MARK in source else _IDS
    for null_content, text_arguments, (ids, call_id) in product((False, True), (False, True), styles):
        arguments: object = {_KEY: _VALUE}
        function = {"name": _TOOL, "arguments": json.dumps(arguments) if text_arguments else arguments}
        call = {"id": call_id, "type": "function", "function": function}
        calling = {"role": "assistant", "content": None if null_content else content(""), "tool_calls": [call]}
        answer = {"role": "tool", "content": content("probe"), "tool_call_id": call_id}
        text = attempt([user, calling, answer], None)
        if _TOOL in text and _VALUE in text and f"'{_KEY}'" not in text:
            return ToolForm(
                shows_tools=shows_tools,
                shows_calls=True,
                text_arguments=text_arguments,
                null_content=null_content,
                ids=ids,
            )
    return ToolForm(shows_tools=shows_tools)


def arranged(messages: Sequence[Plain], form: ToolForm) -> list[Plain]:
    """Plain messages as the template takes their calls."""
    ids: dict[str, str] = {}
    names: dict[str, str] = {}
    result = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            ids[call["id"]] = _id(call["id"], name, len(ids), form)
            names[call["id"]] = name
        arrange = _with_calls if form.shows_calls else _in_words
        result.append(arrange(message, ids if form.shows_calls else names, form))
    return result


def _id(given: str, name: str, index: int, form: ToolForm) -> str:
    if form.ids == "kimi":
        return f"functions.{name}:{index}"
    is_short = len(given) == SHORT_ID_CHARS and given.isascii() and given.isalnum()
    if form.ids == "given" or is_short:
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:SHORT_ID_CHARS]


def _with_calls(message: Plain, ids: Mapping[str, str], form: ToolForm) -> Plain:
    if message["role"] == "tool":
        return message | {"tool_call_id": ids.get(message["tool_call_id"], message["tool_call_id"])}
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if form.text_arguments:
            function = function | {"arguments": _json(function["arguments"])}
        calls.append(call | {"id": ids[call["id"]], "function": function})
    is_empty = not any(part["text"] for part in _parts(message["content"]))
    return message | {"tool_calls": calls} | ({"content": None} if form.null_content and is_empty else {})


def _in_words(message: Plain, names: Mapping[str, str], form: ToolForm) -> Plain:
    """For templates that know no calls: they are text in the form that was asked for, and a result is the user's."""
    if message["role"] == "tool":
        head = f"Result of {names.get(message['tool_call_id'], 'the function')}:\n"
        return {"role": "user", "content": _after(head, message["content"])}
    if "tool_calls" not in message:
        return message
    calls = "\n".join(_json(call["function"]) for call in message["tool_calls"])
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return plain | {"content": _after(calls, message["content"])}


def explained(messages: Sequence[Plain], tools: Sequence[object], *, takes_parts: bool) -> list[Plain]:
    """The conversation with the tools explained at the beginning of its system message."""
    text = "\n".join([_INTRODUCTION, *map(_json, tools), _RULE])
    if messages and messages[0]["role"] == "system":
        return [messages[0] | {"content": _after(text + "\n\n", messages[0]["content"])}, *messages[1:]]
    return [{"role": "system", "content": [{"type": "text", "text": text}] if takes_parts else text}, *messages]


def _parts(content: object) -> list[Plain]:
    if isinstance(content, list):
        return [part for part in content if "text" in part]
    return [{"type": "text", "text": content}]


def _after(head: str, content: str | list[Plain]) -> object:
    """The content with a text before it."""
    return head + content if isinstance(content, str) else [{"type": "text", "text": head}, *content]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
