"""POST /v1/messages: Anthropic's documents, events, errors and counts, over the scripted engine."""

import json
from typing import Any

import pytest
from fastapi import FastAPI

from server.errors import InternalError
from tests.server.exchange import Answer, call, chat, run
from tests.server.fakes import EOS, MODEL, TEMPLATE, TOKENIZER, FakeEngine, make_app, make_tokenizer, says

PATH = "/v1/messages"


def send(app: FastAPI, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    """POST /v1/messages"""
    body = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]} | fields
    return run(call(app, "POST", PATH, body, headers=headers))


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """Each checked: named as its data say."""
    assert answer.complete
    parts = answer.body.decode().split("\n\n")
    assert parts.pop() == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def error_of(answer: Answer) -> tuple[int, str, str]:
    """(status, type, message); the shape is checked."""
    document = answer.json
    assert (document["type"], document["request_id"]) == ("error", answer.headers["request-id"])
    return answer.status, document["error"]["type"], document["error"]["message"]


def prompt_of(engine: FakeEngine) -> str:
    """Of the newest request."""
    text = TOKENIZER.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)
    return text.replace("<|im_start|>", "").replace("<|im_end|>\n", "|")


def test_a_message() -> None:
    engine = FakeEngine(script=says("hello", cached=3))
    answer = send(make_app(engine), system="Be short.", temperature=0.5, top_k=3, metadata={"user_id": "ann"})
    found = answer.json
    assert found.pop("id").startswith("msg_")
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(engine.requests[0].prompt_ids) - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 2,
        },
    }
    assert prompt_of(engine) == "system\nBe short.|user\nhi|assistant\n"
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 3, 100)
    assert answer.headers["x-request-id"] == answer.headers["request-id"]
    assert "x-ignored-params" not in answer.headers


def test_events_come_in_order_and_say_what_the_document_says() -> None:
    app = make_app(FakeEngine(script=says("hello world", per_event=2)))
    events = events_of(send(app, stream=True))
    start, ping, block, *deltas, stop, end, last = events
    assert [event["type"] for event in (start, ping, block, stop, end, last)] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    whole = send(app).json
    assert start["message"]["content"] == []
    assert (start["message"]["stop_reason"], start["message"]["model"]) == (None, MODEL)
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {(delta["type"], delta["index"]) for delta in deltas} == {("content_block_delta", 0)}
    assert "".join(delta["delta"]["text"] for delta in deltas) == whole["content"][0]["text"] == "hello world"
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["o w", "zz"]}, "stop_sequence", "o w"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_reasons_to_stop(fields: dict[str, Any], reason: str, sequence: str | None, stream: bool) -> None:
    answer = send(make_app(FakeEngine(script=says("hello world"))), stream=stream, **fields)
    found = events_of(answer)[-2]["delta"] if stream else answer.json
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


def test_the_end_of_the_context_is_told_from_the_clients_limit() -> None:
    engine = FakeEngine(script=says("x" * 600), max_model_len=64)
    assert send(make_app(engine), max_tokens=1000).json["stop_reason"] == "model_context_window_exceeded"


def test_an_answer_without_text_has_no_content() -> None:
    app = make_app(FakeEngine(script=says("")))
    assert send(app).json["content"] == []
    assert [event["type"] for event in events_of(send(app, stream=True))] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]


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


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens: a value is required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"stop": ["x"]}, "stop is a parameter of chat completions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], named: str) -> None:
    status, kind, message = error_of(send(make_app(FakeEngine()), **fields))
    assert (status, kind) == (400, "invalid_request_error")
    assert named in message


def test_errors_have_anthropics_types() -> None:
    assert error_of(send(make_app(FakeEngine()), model="x"))[:2] == (404, "not_found_error")
    assert error_of(send(make_app(FakeEngine(places=0))))[:2] == (429, "rate_limit_error")
    assert error_of(send(make_app(FakeEngine(), api_key=("k",))))[:2] == (401, "authentication_error")
    assert send(make_app(FakeEngine(), api_key=("k",)), {"x-api-key": "k"}).status == 200
    assert error_of(run(call(make_app(FakeEngine()), "GET", PATH)))[:2] == (405, "invalid_request_error")


def test_a_failure_in_mid_stream_is_an_event() -> None:
    def script(request: Any, choice: int) -> list[Any]:
        return [*says("hello world")(request, choice)[:3], InternalError("broken")]

    app = make_app(FakeEngine(script=script))
    last = events_of(send(app, {"x-request-id": "r1"}, stream=True))[-1]
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "broken"},
        "request_id": "r1",
    }
    assert error_of(send(app))[:2] == (500, "api_error")


def test_tokens_are_counted() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "system": "s"}
    count = run(call(app, "POST", PATH + "/count_tokens", asked)).json
    assert engine.streams == []
    assert send(app, system="s").json["usage"]["input_tokens"] == count["input_tokens"]
    assert error_of(run(call(app, "POST", PATH + "/count_tokens", asked | {"model": "x"})))[:2] == (
        404,
        "not_found_error",
    )


def test_a_chat_request_and_a_message_ask_the_engine_for_the_same() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    send(app, temperature=0.3, top_p=0.9, top_k=5, stop_sequences=["x"], max_tokens=9)
    chat(app, temperature=0.3, top_p=0.9, top_k=5, stop=["x"], max_tokens=9)
    first, second = engine.requests
    assert first.prompt_ids == second.prompt_ids
    assert (first.stop, first.sampling.max_tokens, first.sampling.eos_token_ids) == (("x",), 9, (EOS,))
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (
        second.sampling.temperature,
        second.sampling.top_p,
        second.sampling.top_k,
    )


def test_what_has_no_effect_is_named() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no", "is_error": True}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    answer = send(make_app(FakeEngine()), messages=messages, inference_geo="x")
    assert (answer.status, answer.headers["x-ignored-params"]) == (200, "inference_geo, is_error")


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def test_calls_of_tools_are_blocks() -> None:
    app = make_app(FakeEngine(script=says(f"Well. {CALL}\n{CALL}"), max_model_len=4096), tool_call_parser="hermes")
    found = send(app, tools=[TOOL], tool_choice={"type": "auto"}, max_tokens=500).json
    text, first, second = found["content"]
    assert text == {"type": "text", "text": "Well."}
    assert {**first, "id": ""} == {"type": "tool_use", "id": "", "name": "get_weather", "input": {"city": "Paris"}}
    assert first["id"] != second["id"]
    assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", None)
    events = events_of(send(app, tools=[TOOL], max_tokens=500, stream=True))
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
    events = events_of(send(app, thinking={"type": "disabled"}, stream=True))
    assert prompt_of(engine).endswith("assistant\nFalse")
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas[0] == {"type": "thinking_delta", "thinking": "h"}
    assert {"type": "signature_delta", "signature": ""} in deltas
    assert "".join(delta.get("text", "") for delta in deltas) == "yes"
