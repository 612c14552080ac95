"""Conversations in XTML, which Kimi K3's publisher writes by Python code in place of a chat template: messages to token
ids. Used by `server/prompt/build.py`; API process. `server/xtml.py` reads what the model answers.

A message is a section with attributes, and an assistant's message has sections of its own:

    <|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>

The four marks are special tokens. All else (names of sections, attributes in four pieces, each part of a content) is
encoded piece by piece as ordinary text, as the model learned it; so nothing that a user writes becomes a mark.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from model_runtime.weights.errors import CheckpointError
from server.errors import BadRequest
from server.images import PreparedImage
from server.prompt.images import ChatPrompt
from server.prompt.messages import Form, Message, plain_message
from server.prompt.options import ChatOptions, checked_ids
from server.prompt.tokenizer import Piece, Tokenizer
from server.prompt.tool_form import Plain
from server.reasoning import ReasoningMarks
from server.tools.formats import FORMATS
from server.xtml import CLOSE, END, MARKS, OPEN, SEP

_SWITCHES = ("thinking", "enable_thinking")
_EFFORTS = ("low", "high", "max")
_NEAREST = {
    "none": None,
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
"""OpenAI's efforts -> those that the model knows."""
_FORM = Form(keeps_parts=True)
_TYPES = ((bool, "boolean"), (str, "string"), ((int, float), "number"), (dict, "object"), (list, "array"))
"""Python's types of JSON values; `bool` is before `int`, which it is a kind of."""


class XtmlRenderer:
    """Writes with one tokenizer. Immutable."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises CheckpointError for a tokenizer without the marks."""
        self._tokenizer, self._ids = tokenizer, dict(_special_ids(tokenizer))
        self.names = frozenset({*_SWITCHES, "thinking_effort", "reasoning_effort"})
        self.reserved = frozenset({"messages", "tools", "add_generation_prompt"})
        self.reasoning: ReasoningMarks | None = MARKS
        self.tool_format = FORMATS["kimi_k3"]

    def prompt(
        self, messages: Sequence[Message], images: Sequence[PreparedImage], *, max_model_len: int, options: ChatOptions
    ) -> ChatPrompt:
        """The conversation as ids. Raises BadRequest."""
        assert not images, "Kimi K3 is served as a model of text"
        thinks = _thinks(options.variables)
        writer = _Writer(self._ids, thinks=thinks)
        if options.tools:
            writer.instruct("tool-declare", _TOOLS.format(json=_sorted_json(options.tools)))
        if thinks and (effort := _effort(options.variables)) is not None:
            writer.instruct("thinking-effort", _EFFORT.format(effort=effort))
        plain = [
            plain_message(message, f"messages[{index}]", protect=str, form=_FORM)
            for index, message in enumerate(messages)
        ]
        *before, last = _with_results(plain)
        for message in before:
            writer.message(message)
        writer.message(last, is_whole=not options.continue_final_message)
        if options.add_generation_prompt:
            writer.answer()
        ids = self._tokenizer.encode_pieces(writer.pieces, add_special_tokens=options.add_special_tokens)
        return ChatPrompt(
            ids=checked_ids(ids[-(options.keep_last or 0) :], max_model_len, "messages"),
            is_reasoning=thinks and options.add_generation_prompt,
        )


_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{json}\n```"
_EFFORT = "Now the system is invoked with `thinking_effort={effort}`."


class _Writer:
    """The pieces of one conversation."""

    def __init__(self, ids: Mapping[str, int], *, thinks: bool) -> None:
        """Where the model does not think, messages have no such section."""
        self._ids, self._thinks = ids, thinks
        self.pieces: list[Piece] = []

    def instruct(self, kind: str, text: str) -> None:
        """A message of the format's own."""
        self._section("message", text, ("role", "system"), ("type", kind))
        self._mark(END)

    def message(self, message: Plain, *, is_whole: bool = True) -> None:
        """Without its end if it is not whole: the answer goes on with it. Raises BadRequest where it cannot."""
        role, is_assistant = message["role"], message["role"] == "assistant"
        name = ("tool" if role == "tool" else "name", message.get("name"))
        self._open("message", ("role", role), name, ("index", message.get("index")))
        if is_assistant:
            self._thought(message.get("reasoning_content", ""))
            self._open("response")
        content = message["content"]
        self.pieces += [content] if isinstance(content, str) else [part["text"] for part in content]
        if not is_whole:
            if "tool_calls" in message:
                where = "continue_final_message"
                raise BadRequest(f"With {where} the last message must end with text, not with calls.", param=where)
            return
        if is_assistant:
            self._close("response")
            self._calls(message.get("tool_calls", ()))
        self._close("message")
        self._mark(END)

    def answer(self) -> None:
        """What begins the assistant's answer."""
        self._open("message", ("role", "assistant"))
        self._open("think" if self._thinks else "response")

    def _thought(self, reasoning: str) -> None:
        if self._thinks:
            self._section("think", reasoning if reasoning.strip() else "")

    def _calls(self, calls: Sequence[Plain]) -> None:
        if not calls:
            return
        self._open("tools")
        for index, call in enumerate(calls, start=1):
            function = call["function"]
            self._open("call", ("tool", function["name"]), ("index", index))
            self._arguments(function["arguments"])
            self._close("call")
        self._close("tools")

    def _arguments(self, arguments: object) -> None:
        """One by one; what is no JSON object as it is."""
        if isinstance(arguments, Mapping):
            for key, value in arguments.items():
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                self._section("argument", text, ("key", key), ("type", _type_of(value)))
        elif text := str(arguments).strip():
            self._section("json", text, ("type", "object"))

    def _section(self, name: str, text: str, *attributes: tuple[str, object]) -> None:
        self._open(name, *attributes)
        self.pieces.append(text)
        self._close(name)

    def _open(self, name: str, *attributes: tuple[str, object]) -> None:
        """Attributes that are None are not written."""
        self._mark(OPEN)
        self.pieces.append(name)
        for key, value in attributes:
            if value is not None:
                self.pieces += [f" {key}", '="', str(value).replace("&", "&amp;").replace('"', "&quot;"), '"']
        self._mark(SEP)

    def _close(self, name: str) -> None:
        self._mark(CLOSE)
        self.pieces.append(name)
        self._mark(SEP)

    def _mark(self, mark: str) -> None:
        self.pieces.append(self._ids[mark])


def _special_ids(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    for mark in (OPEN, CLOSE, SEP, END):
        token_id = tokenizer.id_of(mark)
        if token_id is None or not tokenizer.is_special(token_id):
            raise CheckpointError(
                f"the tokenizer has no special token {mark}, with which Kimi K3's conversations are written; "
                "a model that learned another form has it as chat_template.jinja"
            )
        yield mark, token_id


def _with_results(messages: Iterable[Plain]) -> Iterator[Plain]:
    """Results of calls with the function's name and their number, in the order of the calls if all of them answer the
    message before. Raises BadRequest for one of no known call."""
    names: dict[str, str] = {}
    order: dict[str, int] = {}
    count = 0
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        run = list(group)
        if are_results and all(message.get("tool_call_id") in order for message in run):
            run.sort(key=lambda message: order[message["tool_call_id"]])
        for message in run:
            if message["role"] == "assistant":
                calls, count = message.get("tool_calls", ()), 0
                order = {call["id"]: place for place, call in enumerate(calls)}
                names |= {call["id"]: call["function"]["name"] for call in calls}
            elif are_results:
                count += 1
                name = names.get(message.get("tool_call_id", ""), message.get("name"))
                if name is None:
                    raise BadRequest("messages: a result of role 'tool' answers no call before it.", param="messages")
                message |= {"name": name, "index": count}
            yield message


def _type_of(value: object) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def _sorted_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _thinks(variables: Mapping[str, object]) -> bool:
    for name in _SWITCHES:
        match variables.get(name):
            case bool(value):
                return value
            case None:
                continue
            case _:
                raise BadRequest(f"chat_template_kwargs: {name} must be true or false.", param="chat_template_kwargs")
    return True


def _effort(variables: Mapping[str, object]) -> str | None:
    """None: nothing is said of it."""
    if (given := variables.get("thinking_effort")) is not None:
        return _one_of(_EFFORTS, given, "thinking_effort")
    asked = variables.get("reasoning_effort")
    return None if asked is None else _NEAREST[_one_of(tuple(_NEAREST), asked, "reasoning_effort")]


def _one_of(known: Sequence[str], value: object, name: str) -> str:
    if not isinstance(value, str) or value not in known:
        names = ", ".join(known)
        raise BadRequest(f"chat_template_kwargs: {name} must be one of {names}.", param="chat_template_kwargs")
    return value
