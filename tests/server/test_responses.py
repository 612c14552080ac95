"""POST /v1/responses: the document, the events that say the same, and mistakes in this API's words."""

from typing import Any

import pytest

from tests.server.exchange import chat
from tests.server.fakes import FakeEngine, ids_of, logprob_of, make_app, says
from tests.server.responses_case import events_of, get, kinds_of, prompt_of, respond


def test_a_response() -> None:
    engine = FakeEngine(script=says("hello", cached=3))
    answer = respond(make_app(engine), instructions="Be short.", metadata={"a": "b"}, temperature=0.5, user="ann")
    found = answer.json
    (item,) = found["output"]
    part = {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    assert item | {"id": ""} == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    assert (found["id"][:5], found["object"], found["status"], found["error"]) == (
        "resp_",
        "response",
        "completed",
        None,
    )
    assert (found["instructions"], found["metadata"], found["temperature"]) == ("Be short.", {"a": "b"}, 0.5)
    assert found["usage"] == {
        "input_tokens": len(engine.requests[0].prompt_ids),
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(engine.requests[0].prompt_ids) + 2,
    }
    assert prompt_of(engine).startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert engine.requests[0].sampling.temperature == 0.5


def test_events_come_in_order_and_say_what_the_document_says() -> None:
    app = make_app(FakeEngine(script=says("hello world", per_event=2)))
    events = events_of(respond(app, stream=True))
    assert kinds_of(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == "hello world"
    added, done, last = events[2]["item"], events[-2]["item"], events[-1]["response"]
    assert (added["content"], added["status"]) == ([], "in_progress")
    assert last["output"] == [done]
    assert done["id"] == added["id"] == events[4]["item_id"]
    whole = respond(app).json
    assert _without_ids(last) == _without_ids(whole)
    assert get(app, last["id"]).json == last


def _without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{**item, "id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}


def test_an_answer_that_was_cut_is_incomplete() -> None:
    app = make_app(FakeEngine(script=says("hello world")))
    found = respond(app, max_output_tokens=2).json
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (found["output"][0]["status"], found["output"][0]["content"][0]["text"]) == ("incomplete", "hello ")
    assert kinds_of(events_of(respond(app, max_output_tokens=2, stream=True)))[-1] == "incomplete"


def test_an_empty_answer_has_an_item() -> None:
    (item,) = respond(make_app(FakeEngine(script=says("")))).json["output"]
    assert item["content"][0]["text"] == ""


def test_log_probabilities() -> None:
    app = make_app(FakeEngine(script=says("é")))
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    (part,) = respond(app, **asked).json["output"][0]["content"]
    assert [entry["bytes"] for entry in part["logprobs"]] == [[0xC3], [0xA9]]
    assert part["logprobs"][0]["logprob"] == pytest.approx(logprob_of(ids_of("é")[0]))
    assert len(part["logprobs"][0]["top_logprobs"]) == 1
    deltas = [event for event in events_of(respond(app, stream=True, **asked)) if event["type"].endswith("text.delta")]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 1, "tools": [{"type": "function", "name": "f"}]}, "top_logprobs"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {f"k{number}": "v" for number in range(17)}}, "metadata"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"temperature": 3}, "temperature"),
        ({"min_tokens": 5, "max_output_tokens": 4}, "min_tokens"),
        ({"input": "x" * 5000}, "input"),
    ],
)
def test_mistakes_are_named_in_this_apis_words(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    answer = respond(make_app(engine), **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert (engine.streams, engine.reserved) == ([], 0)


def test_a_request_beyond_the_queue_is_refused_at_the_door() -> None:
    answer = respond(make_app(FakeEngine(places=0)))
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")


def test_a_chat_request_and_a_response_ask_the_engine_for_the_same() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    asked = {"temperature": 0.3, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": ["x"], "logit_bias": {"5": 1.0}}
    respond(app, max_output_tokens=9, **asked)
    chat(app, max_tokens=9, **asked)
    first, second = engine.requests
    assert (first.prompt_ids, first.sampling, first.stop) == (second.prompt_ids, second.sampling, second.stop)
