"""Kimi K3's conversations: ids piece by piece, which no text of a user's can change the marks of."""

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runtime.weights.errors import CheckpointError
from server.errors import BadRequest
from server.prompt.build import PromptBuilder
from server.prompt.images import ChatPrompt
from server.prompt.options import ChatOptions
from server.prompt.tokenizer import load_tokenizer
from server.tools.formats import FORMATS
from server.xtml import MARKS as READ_MARKS
from tests.server.prompt_case import Message, user
from tests.server.test_tokenizer_tiktoken import CONFIG, MARKS, RANKS, expected_ids, write_folder
from tests.server.tiny_tokenizers import chatml_folder

SPECIAL = {mark: len(RANKS) + 2 + index for index, mark in enumerate(MARKS)}
SHORT = dict(zip("OCSE", MARKS, strict=True))
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"ü": {"type": "string"}}}},
}
DECLARED = (
    "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
    '[{"function":{"name":"f","parameters":{"properties":{"ü":{"type":"string"}},"type":"object"}},"type":"function"}]'
    "\n```"
)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    return PromptBuilder(load_tokenizer(k3_folder(tmp_path_factory.mktemp("k3"))))


def k3_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k3"}))
    return write_folder(folder, CONFIG)


def written(builder: PromptBuilder, messages: list[Message], **options: Any) -> ChatPrompt:
    return asyncio.run(builder.chat(messages, max_model_len=8192, options=ChatOptions(**options)))


def ids(text: str) -> list[int]:
    """Of pieces, between which bars stand; the letters of `SHORT` are marks."""
    found: list[int] = []
    for piece in text.split("¦"):
        found += [SPECIAL[SHORT[piece]]] if piece in SHORT else expected_ids(piece)
    return found


def opened(tag: str, /, **attributes: str) -> str:
    return f"O¦{tag}" + "".join(f'¦ {key}¦="¦{value}¦"' for key, value in attributes.items()) + "¦S¦"


def closed(tag: str) -> str:
    return f"C¦{tag}¦S¦"


def section(tag: str, text: str = "", /, **attributes: str) -> str:
    return opened(tag, **attributes) + f"{text}¦" * bool(text) + closed(tag)


def message(text: str, /, **attributes: str) -> str:
    return section("message", text, **attributes) + "E¦"


ANSWER = 'O¦message¦ role¦="¦assistant¦"¦S¦O¦think¦S'
HI = 'O¦message¦ role¦="¦user¦"¦S¦Hi¦C¦message¦S¦E¦'


def call(index: int, arguments: str, name: str = "f") -> Message:
    return {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(index: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"c{index}", "content": text}


CALLS: Message = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "hm\n",
    "tool_calls": [call(1, '{"b": "x\\ny", "a": [1, {"k": null}]}'), call(2, "{}", "g"), call(3, '{"a": 01}')],
}
CALLS_TEXT = (
    opened("message", role="assistant")
    + section("think", "hm\n")
    + section("response")
    + opened("tools")
    + opened("call", tool="f", index="1")
    + section("argument", "x\ny", key="b", type="string")
    + section("argument", '[1, {"k": null}]', key="a", type="array")
    + closed("call")
    + section("call", tool="g", index="2")
    + opened("call", tool="f", index="3")
    + section("json", '{"a": 01}', type="object")
    + closed("call")
    + closed("tools")
    + closed("message")
    + "E¦"
)


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([user("Hi")], {}, HI + ANSWER),
        ([user("Hi")], {"add_generation_prompt": False}, HI.rstrip("¦")),
        ([user("Hi")], {"variables": {"thinking": False}}, HI + ANSWER.replace("think", "response")),
        ([user("Hi")], {"keep_last": 1}, "S"),
        (
            [{"role": "developer", "content": "Be brief."}, {"role": "user", "name": 'A "&" B', "content": "Hi"}],
            {},
            message("Be brief.", role="system") + message("Hi", role="user", name="A &quot;&amp;&quot; B") + ANSWER,
        ),
        (
            [user([{"type": "text", "text": "the cap"}, {"type": "text", "text": "ital"}])],
            {},
            message("the cap¦ital", role="user") + ANSWER,
        ),
        (
            [user("Hi"), {"role": "assistant", "content": "Yes.", "reasoning_content": " \n"}, user("Hi")],
            {},
            HI
            + opened("message", role="assistant")
            + section("think")
            + section("response", "Yes.")
            + closed("message")
            + f"E¦{HI}{ANSWER}",
        ),
        (
            [user("Hi"), {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}],
            {"variables": {"enable_thinking": False}, "add_generation_prompt": False},
            HI + opened("message", role="assistant") + section("response", "Yes.") + closed("message") + "E",
        ),
        (
            [user("Hi"), CALLS, result(1, "one"), result(2, "two"), result(3, "3")],
            {"tools": (TOOL,)},
            message(DECLARED, role="system", type="tool-declare")
            + HI
            + CALLS_TEXT
            + message("one", role="tool", tool="f", index="1")
            + message("two", role="tool", tool="g", index="2")
            + message("3", role="tool", tool="f", index="3")
            + ANSWER,
        ),
        (
            [user("Hi"), {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}],
            {"continue_final_message": True, "add_generation_prompt": False},
            HI + opened("message", role="assistant") + section("think", "hm") + opened("response") + "Yes",
        ),
        (
            [user("Hi")],
            {"continue_final_message": True, "add_generation_prompt": False},
            opened("message", role="user") + "Hi",
        ),
    ],
)
def test_ids(builder: PromptBuilder, messages: list[Message], options: dict[str, Any], expected: str) -> None:
    assert written(builder, messages, **options).ids.tolist() == ids(expected)


def test_parts_of_a_content_do_not_grow_together() -> None:
    assert ids("the cap¦ital") != ids("the capital")


def test_results_come_in_the_order_of_the_calls(builder: PromptBuilder) -> None:
    in_order = written(builder, [user("Hi"), CALLS, result(1, "one"), result(2, "two"), result(3, "3")])
    assert written(builder, [user("Hi"), CALLS, result(3, "3"), result(1, "one"), result(2, "two")]) == in_order


def test_results_of_earlier_calls_stay_where_they_are(builder: PromptBuilder) -> None:
    again: Message = {"role": "assistant", "content": "", "tool_calls": [call(4, "{}", "h"), call(5, " ", "i")]}
    found = written(builder, [CALLS, again, result(5, "five"), result(2, "two")], add_generation_prompt=False)
    expected = (
        CALLS_TEXT
        + opened("message", role="assistant")
        + section("think")
        + section("response")
        + opened("tools")
        + section("call", tool="h", index="1")
        + section("call", tool="i", index="2")
        + closed("tools")
        + closed("message")
        + "E¦"
        + message("five", role="tool", tool="i", index="1")
        + message("two", role="tool", tool="g", index="2")
    )
    assert found.ids.tolist() == ids(expected.rstrip("¦"))
    with pytest.raises(BadRequest, match="answers no call before it"):
        written(builder, [result(1, "one")])


@pytest.mark.parametrize(
    ("variables", "effort"),
    [
        ({}, None),
        ({"thinking_effort": None}, None),
        ({"thinking_effort": "max"}, "max"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "medium"}, "high"),
        ({"reasoning_effort": "xhigh"}, "max"),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "low", "thinking_effort": "high"}, "high"),
    ],
)
def test_effort(builder: PromptBuilder, variables: dict[str, object], effort: str | None) -> None:
    said = f"Now the system is invoked with `thinking_effort={effort}`."
    before = message(said, role="system", type="thinking-effort") if effort else ""
    found = written(builder, [user("Hi")], variables=variables)
    assert (found.ids.tolist(), found.is_reasoning) == (ids(before + HI + ANSWER), True)
    quiet = written(builder, [user("Hi")], variables=variables | {"thinking": False})
    assert (quiet.ids.tolist(), quiet.is_reasoning) == (ids(HI + ANSWER.replace("think", "response")), False)


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([user("Hi")], {"variables": {"thinking_effort": "medium"}}, "thinking_effort must be one of low, high, max"),
        ([user("Hi")], {"variables": {"reasoning_effort": ["low"]}}, "reasoning_effort must be one of none, minimal"),
        ([user("Hi")], {"variables": {"thinking": "no"}}, "thinking must be true or false"),
        ([user("Hi")], {"variables": {"tools": []}}, "cannot change tools"),
        ([user("Hi"), CALLS], {"continue_final_message": True}, "must end with text, not with calls"),
        ([user([{"type": "image_url", "image_url": {"url": "data:,"}}])], {}, "does not accept images"),
        ([user("the " * 8192)], {}, "8192 tokens"),
    ],
)
def test_refusals(builder: PromptBuilder, messages: list[Message], options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        written(builder, messages, **options)


PARTS = st.lists(
    st.sampled_from(
        [*MARKS, "<|", "|>", "open", "message", ' role="', "system", '"', "[EOS]", f"<|reserved_token_{len(RANKS)}|>"]
    )
    | st.text(max_size=4),
    min_size=1,
    max_size=5,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(PARTS, PARTS, st.sampled_from(["user", "system", "tool", "name", "reasoning", "arguments", "function", "tools"]))
def test_what_users_write_is_text(builder: PromptBuilder, text: str, more: str, place: str) -> None:
    """The prompt has the special tokens that it has with harmless text in the place, and in the same order."""
    messages, tools = conversation(text, more, place)
    harmless, plain_tools = conversation("x", "y", place)
    assert specials(written(builder, messages, tools=tools)) == specials(written(builder, harmless, tools=plain_tools))


def conversation(text: str, more: str, place: str) -> tuple[list[Message], list[dict[str, Any]]]:
    def at(name: str, harmless: str = "Hi") -> str:
        return text if place == name else harmless

    arguments = json.dumps({at("arguments"): more, f"{more}2": [text]} if place == "arguments" else {"a": "b", "c": []})
    asked: Message = {"role": "user", "content": [{"type": "text", "text": part} for part in (at("user"), more)]}
    answer: Message = {
        "role": "assistant",
        "content": more,
        "reasoning_content": f"hm {at('reasoning')}",
        "tool_calls": [call(1, arguments, at("function"))],
    }
    system: Message = {"role": "system", "content": at("system")}
    tools = [TOOL | {at("tools"): {more: text}}]
    return [system, asked | {"name": f"n{at('name')}"}, answer, result(1, at("tool"))], tools


def specials(prompt: ChatPrompt) -> "array[int]":
    return array("i", [token for token in prompt.ids if token >= len(RANKS)])


def test_what_the_checkpoint_stands_for(builder: PromptBuilder, tmp_path: Path) -> None:
    assert builder.reasoning == READ_MARKS
    assert builder.tool_format is FORMATS["kimi_k3"]
    assert builder.variables == {"thinking", "enable_thinking", "thinking_effort", "reasoning_effort"}
    folder = k3_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert written(PromptBuilder(load_tokenizer(folder)), [user("Hi")]).ids.tolist() == expected_ids("Hi")
    assert PromptBuilder(load_tokenizer(folder), tool_parser="hermes").tool_format is FORMATS["hermes"]


def test_a_tokenizer_without_the_marks(tmp_path: Path) -> None:
    chatml_folder(tmp_path, chat_template=None)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k3"}')
    with pytest.raises(CheckpointError, match=r"no special token <\|open\|>"):
        PromptBuilder(load_tokenizer(tmp_path))
