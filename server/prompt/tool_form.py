"""How a chat template takes tools and calls, and conversations arranged accordingly. Used by `server/prompt/build.py`.

API process. Pure. What a template does with them is found by trying it (`probe`): some want a call's arguments as text,
some show calls only where the content is null, Mistral's refuse ids that are not nine letters and digits, and many know
nothing of tools. For those the tools are explained in words, and calls and their results become text.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias

from server.errors import BadRequest
from server.tools.forced import Wrap

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
_RULE = "To call functions, answer with nothing but calls of this form:"
_ELSE = "Else answer in words."


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """What a template does with tools."""

    shows_tools: bool = False
    shows_calls: bool = False
    text_arguments: bool = False
    """A call's arguments must be JSON text; else they should be an object."""
    only_objects: bool = False
    """The template fails on arguments that are text."""
    null_content: bool = False
    """A message with calls must have null for empty content."""
    ids: IdStyle = "given"
    """How the template, or the model behind it, wants the ids of calls."""
    one_call: bool = False
    """A message may have one call only."""


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
        if _shows_call(attempt([user, calling, answer], None)):
            twice = [user, calling | {"tool_calls": [call, call]}, answer, answer]
            wordy = call | {"function": {"name": _TOOL, "arguments": _VALUE}}
            return ToolForm(
                shows_tools=shows_tools,
                shows_calls=True,
                text_arguments=text_arguments,
                only_objects=_VALUE not in attempt([user, calling | {"tool_calls": [wordy]}, answer], None),
                null_content=null_content,
                ids=ids,
                one_call=not _shows_call(attempt(twice, None)),
            )
    return ToolForm(shows_tools=shows_tools)


def _shows_call(text: str) -> bool:
    """Arguments must not come as Python writes them."""
    return _TOOL in text and _VALUE in text and f"'{_KEY}'" not in text


def arranged(
    messages: Sequence[Plain], tools: Sequence[object], form: ToolForm, *, wrap: Wrap, takes_parts: bool
) -> list[Plain]:
    """Plain messages as the template takes their calls, and the tools if it does not. `wrap` is how calls are written
    where the template does not write them."""
    ids: dict[str, str] = {}
    names: dict[str, str] = {}
    result = []
    for message in _one_by_one(messages) if form.one_call else messages:
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            ids[call["id"]] = _id(call["id"], name, len(ids), form)
            names[call["id"]] = name
        result.append(_with_calls(message, ids, form) if form.shows_calls else _in_words(message, names, wrap))
    return _explained(result, tools, wrap, takes_parts) if tools and not form.shows_tools else result


def _one_by_one(messages: Sequence[Plain]) -> Iterator[Plain]:
    """Several calls of a message as several messages, each followed by its result."""
    moved: set[int] = set()
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if index not in moved:
                yield message
            continue
        end = next((at for at in range(index + 1, len(messages)) if messages[at]["role"] != "tool"), len(messages))
        for number, call in enumerate(calls):
            yield message | {"tool_calls": [call]} | ({"content": ""} if number else {})
            results = [at for at in range(index + 1, end) if messages[at]["tool_call_id"] == call["id"]]
            moved.update(results)
            yield from (messages[at] for at in results)


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
            function = function | {"arguments": _text(function["arguments"])}
        elif form.only_objects and isinstance(function["arguments"], str):
            raise BadRequest(
                "messages: the arguments of a tool call are no JSON object, and this model's chat template takes "
                "nothing else. Leave the call and its result out.",
                param="messages",
            )
        calls.append(call | {"id": ids[call["id"]], "function": function})
    is_empty = not any(part["text"] for part in _parts(message["content"]))
    return message | {"tool_calls": calls} | ({"content": None} if form.null_content and is_empty else {})


def _in_words(message: Plain, names: Mapping[str, str], wrap: Wrap) -> Plain:
    """For templates that know no calls: they are text, and a result is the user's."""
    if message["role"] == "tool":
        head = f"Result of {names.get(message['tool_call_id'], 'the function')}:\n"
        return {"role": "user", "content": _after(head, message["content"])}
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = "\n".join(_written(function["name"], function["arguments"], wrap) for function in functions)
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return plain | {"content": _after(calls, message["content"])}


def _written(name: str, arguments: object, wrap: Wrap) -> str:
    begin, end = wrap(name)
    return begin + _text(arguments) + end


def _explained(messages: Sequence[Plain], tools: Sequence[object], wrap: Wrap, takes_parts: bool) -> list[Plain]:
    """The conversation with the tools explained at the beginning of its system message."""
    example = _written("FUNCTION", {"PARAMETER": "VALUE"}, wrap)
    text = "\n".join([_INTRODUCTION, *map(_json, tools), _RULE, example, _ELSE])
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


def _text(arguments: object) -> str:
    """Of a call, as it is written."""
    return arguments if isinstance(arguments, str) else _json(arguments)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
