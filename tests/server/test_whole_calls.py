"""Whether a call is whole, in the words of each API: one that broke off or went wrong is never called complete.

And where it stands, and that its arguments are what JSON can hold."""

import json
from typing import Any

import pytest

from tests.server.exchange import Answer, call, chat, run
from tests.server.fakes import MODEL, FakeEngine, make_app, says

WHOLE = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
BROKEN = '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'


def post(path: str, text: str, per_event: int = 1, **fields: Any) -> Answer:
    app = make_app(FakeEngine(script=says(text, per_event=per_event), max_model_len=4096), tool_call_parser="hermes")
    answer = run(call(app, "POST", path, {"model": MODEL} | fields))
    assert answer.status == 200, answer.body
    return answer


def responses(text: str, **fields: Any) -> tuple[str, str]:
    """(status of the call, status of the response)"""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    document = post("/v1/responses", text, input="hi", tools=[tool], **fields).json
    [item] = [item for item in document["output"] if item["type"] == "function_call"]
    return item["status"], document["status"]


def messages(text: str, **fields: Any) -> str:
    """The stop reason."""
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body = {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    return str(post("/v1/messages", text, **(body | fields)).json["stop_reason"])


def completions(text: str, **fields: Any) -> str:
    """The finish reason."""
    app = make_app(FakeEngine(script=says(text), max_model_len=4096), tool_call_parser="hermes")
    answer = chat(app, tools=[{"type": "function", "function": {"name": "f"}}], **fields)
    return str(answer.json["choices"][0]["finish_reason"])


def test_a_whole_call() -> None:
    assert responses(WHOLE) == ("completed", "completed")
    assert messages(WHOLE) == "tool_use"
    assert completions(WHOLE) == "tool_calls"


def test_a_call_that_went_wrong() -> None:
    assert responses(BROKEN) == ("incomplete", "completed")
    assert messages(BROKEN) == "end_turn"
    assert completions(BROKEN) == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("text", [BROKEN, "I would rather not.", WHOLE[:-14]])
def test_a_call_that_was_demanded_and_did_not_come(choice: object, text: str) -> None:
    """H17: no output without a whole call ends with one."""
    assert completions(text, tool_choice=choice) == "stop"


@pytest.mark.parametrize("limit", [40, 45])
def test_a_call_that_was_cut(limit: int) -> None:
    assert responses(WHOLE, max_output_tokens=limit) == ("incomplete", "incomplete")
    assert messages(WHOLE, max_tokens=limit) == "max_tokens"
    assert completions(WHOLE, max_tokens=limit) == "length"


def test_a_named_function() -> None:
    """Where OpenAI's chat says "stop", Anthropic's messages still say that a tool is used."""
    assert messages(WHOLE, tool_choice={"type": "tool", "name": "f"}) == "tool_use"
    assert completions(WHOLE, tool_choice={"type": "function", "function": {"name": "f"}}) == "stop"


@pytest.mark.parametrize("per_event", [1, 7, 1000])
def test_text_between_calls_keeps_its_place(per_event: int) -> None:
    """However many tokens come at once, streamed or not."""
    text = f"One. {WHOLE} Two. {WHOLE}{WHOLE}Three."
    expected = ["One.", "f", " Two.", "f", "f", "Three."]
    body: dict[str, Any] = {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    document = post("/v1/messages", text, per_event, tools=[tool], **body).json
    assert [block.get("text") or block["name"] for block in document["content"]] == expected
    events = post("/v1/messages", text, per_event, tools=[tool], stream=True, **body).named_events
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["text", "tool_use", "text", "tool_use", "tool_use", "text"]
    body = {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]}
    streamed = post("/v1/responses", text, per_event, stream=True, **body).named_events[-1]["response"]
    for answer in (post("/v1/responses", text, per_event, **body).json, streamed):
        items = [item.get("name") or item["content"][0]["text"] for item in answer["output"]]
        assert items == expected


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (r'{"a": "\ud83d\ude00"}', r'{"a":"\ud83d\ude00"}'),
        (r'{"a": "\ud83dx\ude00", "b": "\uD83D"}', r'{"a":"\ufffdx\ufffd","b":"\ufffd"}'),
        (json.dumps(r'{"\ud83d": ["\n", 1e999] }'), r'{"\ufffd":["\n",1e999]}'),
        (f'{{"a": {10**30}}}', f'{{"a":{10**30}}}'),
    ],
)
def test_arguments_that_no_text_or_number_can_hold(written: str, arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    choice = post(
        "/v1/chat/completions",
        text,
        messages=[{"role": "user", "content": "hi"}],
        tools=[{"type": "function", "function": {"name": "f"}}],
    ).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
    body = {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    assert f'"input":{arguments}'.encode() in post("/v1/messages", text, tools=[tool], **body).body


@pytest.mark.parametrize("written", ['"[]"', '"{} {}"', '""', '"{"', '"NaN"'])
def test_a_string_of_arguments_must_be_one_object(written: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    assert completions(text) == "stop"
