"""Parsers of tool calls: what they find, the same however the text is cut, and nothing called complete that is not."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.detokenize import TextDecoder
from server.tools.calls import AnswerPart, CallPart
from server.tools.formats import FORMATS, format_of
from server.tools.reader import Format, ToolReader
from tests.server.transcript import PARIS_JSON, TOOLS, Transcript
from tests.server.transcripts import ALL, CASES

Found = tuple[str, list[tuple[str, str]], bool]
IDS = [f"{name}-{index}" for name, transcripts in ALL.items() for index in range(len(transcripts))]


def joined(parts: Iterable[AnswerPart]) -> list[tuple[str, str]]:
    """(name, arguments) of each call. Indexes count up, and only the first part of a call has an id and a name."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, str):
            continue
        if part.id:
            assert part.index == len(calls) and part.name
            calls.append((part.name, ""))
        assert part.index == len(calls) - 1
        assert part.id or (not part.name and (part.arguments or part.is_complete))
        calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return calls


def read(format: Format, pieces: Iterable[str]) -> Found:
    """(content, calls, whether all of them are complete)"""
    reader = ToolReader(format, TOOLS)
    parts: list[AnswerPart] = []
    for piece in pieces:
        reader.push(piece)
        parts += reader.take()
    reader.finish()
    parts += reader.take()
    return "".join(part for part in parts if isinstance(part, str)), joined(parts), reader.has_calls


def decoded(pieces: Iterable[bytes]) -> list[str]:
    decoder = TextDecoder()
    return [decoder.push(piece) for piece in pieces]


@pytest.mark.parametrize(("name", "transcript"), CASES, ids=IDS)
def test_transcripts(name: str, transcript: Transcript) -> None:
    content, calls, complete = read(FORMATS[name].read, [transcript.text])
    assert content == transcript.content
    assert [(name, json.loads(arguments)) for name, arguments in calls] == transcript.calls
    assert complete == transcript.complete


@pytest.mark.parametrize(("name", "transcript"), CASES, ids=IDS)
def test_cut_at_every_byte(name: str, transcript: Transcript) -> None:
    """In two at each place, and all into single bytes."""
    data, format = transcript.text.encode(), FORMATS[name].read
    whole = read(format, [transcript.text])
    for place in range(len(data) + 1):
        assert read(format, decoded([data[:place], data[place:]])) == whole
    assert read(format, decoded(bytes([byte]) for byte in data)) == whole


@pytest.mark.parametrize(("name", "transcript"), CASES, ids=IDS)
def test_truncated_at_every_character(name: str, transcript: Transcript) -> None:
    """A call that is called complete has all its arguments, and one that is not has their beginning."""
    format = FORMATS[name].read
    _, whole, _ = read(format, [transcript.text])
    for place in range(len(transcript.text)):
        _, calls, complete = read(format, [transcript.text[:place]])
        for (function, arguments), (expected_function, expected) in zip(calls, whole, strict=False):
            assert function == expected_function
            assert expected.startswith(arguments)
        if complete:
            assert calls == whole[: len(calls)]
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


PIECES = st.lists(
    st.one_of(
        st.sampled_from([text for transcript in CASES for text in (transcript[1].text, transcript[1].text[:40])]),
        st.sampled_from(['"', "{", "}", "[", "]", ",", ":", "\\", " ", "\n", "1", "null", "</", ">", "now", '"name"']),
        st.text(max_size=4),
    ),
    max_size=5,
)


@settings(max_examples=200)
@given(st.sampled_from(sorted(FORMATS)), PIECES)
def test_anything_may_come(name: str, pieces: list[str]) -> None:
    format = FORMATS[name].read
    found = read(format, pieces)
    assert read(format, list("".join(pieces))) == found
    _, calls, complete = found
    assert not complete or all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(
    ("arguments", "rest"), [('{"city": Paris}', "Paris}"), ('{"city": 01}', "01}"), ('{"city" "Paris"}', '"Paris"}')]
)
def test_a_call_that_breaks_after_it_began_stays_incomplete(arguments: str, rest: str) -> None:
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}'
    content, calls, complete = read(FORMATS["hermes"].read, [text])
    assert (content, complete) == (rest, False)
    assert [name for name, _ in calls] == ["get_weather"]
    valid = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS_JSON}}}</tool_call>'
    _, calls, complete = read(FORMATS["hermes"].read, [text, valid])
    assert ([name for name, _ in calls], complete) == (["get_weather"] * 2, False)


def test_arguments_come_as_they_are_written() -> None:
    """X17: of a long argument half has come before half of the text."""
    text = "x" * 1800
    arguments = json.dumps({"text": text})
    wrapped = [(name, arguments.join(format.wrap("write_file"))) for name, format in FORMATS.items() if format.wrap]
    assert len(wrapped) == 9
    for name, output in (
        *wrapped,
        ("qwen3_coder", f"<function=write_file><parameter=text>{text}</parameter></function>"),
        ("glm45", f"<tool_call>write_file<arg_key>text</arg_key><arg_value>{text}</arg_value></tool_call>"),
        (
            "kimi_k3",
            f'<|open|>call tool="write_file"<|sep|><|open|>argument key="text" type="string"<|sep|>{text}'
            "<|close|>argument<|sep|><|close|>call<|sep|>",
        ),
    ):
        reader = ToolReader(FORMATS[name].read, TOOLS)
        reader.push(output[: len(output) // 2])
        assert len(joined(reader.take())[0][1]) > 800


def test_one_call_may_be_all() -> None:
    reader = ToolReader(FORMATS["hermes"].read, TOOLS, only_one=True)
    call = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS_JSON}}}</tool_call>'
    reader.push(call[:-20])
    assert not reader.is_over
    reader.push(call[-20:] * 2 + call)
    assert reader.is_over and reader.has_calls
    assert joined(reader.take()) == [("get_weather", '{"city":"Paris"}')]


@pytest.mark.parametrize(("depth", "complete"), [(64, True), (65, False)])
def test_nesting_is_bounded(depth: int, complete: bool) -> None:
    arguments = '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)
    assert read(FORMATS["json"].read, [f'{{"name": "now", "arguments": {arguments}}}'])[2] == complete


def test_heads_are_bounded() -> None:
    text = "<function=" + "x" * 513
    assert read(FORMATS["qwen3_coder"].read, [text]) == (text, [], False)


def test_ids_differ() -> None:
    reader = ToolReader(FORMATS["llama3_json"].read, TOOLS)
    reader.push(";".join(['{"name": "now"}'] * 20))
    ids = [part.id for part in reader.take() if isinstance(part, CallPart) and part.id]
    assert len(set(ids)) == 20
    assert all(id.startswith("call_") and len(id) == 29 for id in ids)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("Environment: ipython", "llama3_json"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v31"),
        ("<｜tool▁call▁begin｜>\n```json", "deepseek_v3"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
        ("{{ tools | tojson }}", "json"),
    ],
)
def test_the_template_tells_the_format(template: str, name: str) -> None:
    assert format_of(template, shows_tools=True) is FORMATS[name]


def test_a_template_that_knows_no_tools_gets_a_format_that_is_json() -> None:
    assert format_of("<tool_call>", shows_tools=False) is FORMATS["hermes"]
    assert format_of("<arg_key>", shows_tools=False) is FORMATS["json"]


def test_declared_types_decide() -> None:
    tools: dict[str, Any] = {"now": {"properties": {"a": {"type": "string"}, "b": {}, "c": {"anyOf": [{}, {}]}}}}
    reader = ToolReader(FORMATS["glm45"].read, tools)
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>1</arg_value>" for key in "abcd")
    reader.push(f"<tool_call>now{pairs}</tool_call>")
    assert json.loads(joined(reader.take())[0][1]) == {"a": "1", "b": 1, "c": 1, "d": 1}
