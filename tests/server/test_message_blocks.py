"""The blocks of /v1/messages: what becomes of those that are sent, and which of them an answer has."""

import json
from typing import Any

import pytest

from tests.server.fakes import CALL, TEMPLATE, FakeEngine, make_app, make_tokenizer, says
from tests.server.messages_case import error_of, prompt_of, send

TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def test_blocks_become_messages() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "system", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    system = [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}]
    assert send(make_app(engine), messages=messages, system=system).status == 200
    assert prompt_of(engine) == "system\ns\nt|user\na\nb|assistant\ncd|system\ne|user\nf|assistant\n"


def test_the_answer_goes_on_with_a_last_message_of_the_assistants() -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is ("}]
    assert send(make_app(engine), messages=messages).status == 200
    assert prompt_of(engine) == "user\nhi|assistant\nThe answer is ("


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"type": "document", "source": {}}, "messages[0].content[0]: blocks of type 'document'"),
        ({"type": "text"}, "messages[0].content[0].text"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "messages[0].content[0].source"),
        ({"type": "image", "source": {"type": "base64", "data": "x"}}, "source.media_type"),
        ({"type": "image"}, "content[0].source"),
        ({"type": "tool_result", "content": "x"}, "tool_use_id"),
        ({"type": "tool_result", "tool_use_id": "t", "content": [5]}, "content[0].content"),
        ({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "search_result"}]}, "'search_result'"),
        ({"type": "tool_use", "id": "t", "name": "f", "input": {}}, "'tool_use'"),
        ({}, "'None'"),
    ],
)
def test_blocks_that_are_not_understood_are_named(block: dict[str, Any], named: str) -> None:
    engine = FakeEngine()
    answer = send(make_app(engine), messages=[{"role": "user", "content": [block]}])
    status, kind, message = error_of(answer)
    assert (status, kind) == (400, "invalid_request_error")
    assert named in message
    assert (engine.streams, engine.reserved) == ([], 0)


def test_calls_of_tools_are_blocks() -> None:
    app = make_app(FakeEngine(script=says(f"Well. {CALL}\n{CALL}"), max_model_len=4096), tool_call_parser="hermes")
    found = send(app, tools=[TOOL], tool_choice={"type": "auto"}, max_tokens=500).json
    text, first, second = found["content"]
    assert text == {"type": "text", "text": "Well."}
    assert {**first, "id": ""} == {"type": "tool_use", "id": "", "name": "get_weather", "input": {"city": "Paris"}}
    assert first["id"] != second["id"]
    assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", None)
    events = send(app, tools=[TOOL], max_tokens=500, stream=True).named_events
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in starts] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "tool_use"),
    ]
    assert starts[1]["content_block"]["input"] == {}
    pieces = [
        event["delta"].get("partial_json", "") for event in events if event.get("index") == 1 and "delta" in event
    ]
    assert json.loads("".join(pieces)) == {"city": "Paris"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_call_that_was_cut_is_told_from_a_whole_one() -> None:
    app = make_app(FakeEngine(script=says(CALL), max_model_len=4096), tool_call_parser="hermes")
    found = send(app, tools=[TOOL], max_tokens=60).json
    assert (found["stop_reason"], found["content"][0]["input"]) == ("max_tokens", {})


def test_results_of_tools_go_back() -> None:
    engine = FakeEngine(max_model_len=4096)
    call_block = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Well."}, call_block]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    assert send(make_app(engine), messages=messages, tools=[TOOL]).status == 200
    assert prompt_of(engine).endswith("|user\nResult of get_weather:\nsunny|user\nSo?|assistant\n")
    assert error_of(send(make_app(engine), messages=messages[2:]))[0] == 400


def test_reasoning_is_a_block() -> None:
    template = TEMPLATE + "{# <think> </think> #}{{ enable_thinking }}"
    engine = FakeEngine(script=says("<think>hm</think>yes"))
    app = make_app(engine, make_tokenizer(template=template))
    found = send(app, thinking={"type": "enabled", "budget_tokens": 5})
    assert found.json["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "yes"},
    ]
    assert prompt_of(engine).endswith("assistant\nTrue")
    assert found.headers["x-ignored-params"] == "thinking.budget_tokens"
    events = send(app, thinking={"type": "disabled"}, stream=True).named_events
    assert prompt_of(engine).endswith("assistant\nFalse")
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas[0] == {"type": "thinking_delta", "thinking": "h"}
    assert {"type": "signature_delta", "signature": ""} in deltas
    assert "".join(delta.get("text", "") for delta in deltas) == "yes"
