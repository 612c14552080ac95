"""Whether a call is whole, in the words of each API: one that broke off or went wrong is never called complete."""

from typing import Any

import pytest

from tests.server.exchange import Answer, call, chat, run
from tests.server.fakes import MODEL, FakeEngine, make_app, says

WHOLE = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
BROKEN = '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'


def post(path: str, text: str, **fields: Any) -> Answer:
    app = make_app(FakeEngine(script=says(text), max_model_len=4096), tool_call_parser="hermes")
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


@pytest.mark.parametrize("limit", [40, 45])
def test_a_call_that_was_cut(limit: int) -> None:
    assert responses(WHOLE, max_output_tokens=limit) == ("incomplete", "incomplete")
    assert messages(WHOLE, max_tokens=limit) == "max_tokens"
    assert completions(WHOLE, max_tokens=limit) == "length"


def test_a_named_function() -> None:
    """Where OpenAI's chat says "stop", Anthropic's messages still say that a tool is used."""
    assert messages(WHOLE, tool_choice={"type": "tool", "name": "f"}) == "tool_use"
    assert completions(WHOLE, tool_choice={"type": "function", "function": {"name": "f"}}) == "stop"
