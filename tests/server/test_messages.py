"""POST /v1/messages: Anthropic's documents, events, errors and counts, over the scripted engine."""

from typing import Any

import pytest

from tests.server.exchange import call, chat, run
from tests.server.fakes import EOS, MODEL, FakeEngine, breaks, make_app, says
from tests.server.messages_case import PATH, error_of, prompt_of, send


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
    events = send(app, stream=True).named_events
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
    found = answer.named_events[-2]["delta"] if stream else answer.json
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


def test_the_end_of_the_context_is_told_from_the_clients_limit() -> None:
    engine = FakeEngine(script=says("x" * 600), max_model_len=64)
    assert send(make_app(engine), max_tokens=1000).json["stop_reason"] == "model_context_window_exceeded"


def test_an_answer_without_text_has_no_content() -> None:
    app = make_app(FakeEngine(script=says("")))
    assert send(app).json["content"] == []
    assert [event["type"] for event in send(app, stream=True).named_events] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]


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
    app = make_app(FakeEngine(script=breaks("hello world")))
    last = send(app, {"x-request-id": "r1"}, stream=True).named_events[-1]
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
