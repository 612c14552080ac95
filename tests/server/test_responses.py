"""POST /v1/responses and what can be done with a response: documents, events, conversations, background, limits."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from server.errors import InternalError
from tests.server.exchange import Answer, Exchange, call, chat, run
from tests.server.fakes import (
    MODEL,
    TEMPLATE,
    TOKENIZER,
    FakeEngine,
    ids_of,
    logprob_of,
    make_app,
    make_tokenizer,
    says,
)

PATH = "/v1/responses"


def respond(app: FastAPI, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    """POST /v1/responses"""
    return run(call(app, "POST", PATH, {"model": MODEL, "input": "hi"} | fields, headers=headers))


def get(app: FastAPI, path: str, headers: dict[str, str] | None = None) -> Answer:
    return run(call(app, "GET", f"{PATH}/{path}", headers=headers))


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """Each checked: named as its data say, numbered from 0."""
    assert answer.complete and answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = answer.body.decode().split("\n\n")
    assert parts.pop() == ""
    events = []
    for number, part in enumerate(parts):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
    return events


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """Types without their prefix, each run of equal ones once."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]


def prompt_of(engine: FakeEngine) -> str:
    """Of the newest request."""
    return TOKENIZER.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)


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


def test_items_become_messages() -> None:
    engine = FakeEngine()
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"role": "user", "content": "v"},
    ]
    assert respond(make_app(engine), input=items).status == 200
    begun = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip("suau", "duav", strict=True)]
    names = {"s": "system", "u": "user", "a": "assistant"}
    expected = "".join(part.replace(f">{part[12]}\n", f">{names[part[12]]}\n", 1) for part in begun)
    assert prompt_of(engine) == expected + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ({"type": "web_search_call", "id": "w"}, "input[0]: items of type 'web_search_call'"),
        ({"type": "item_reference", "id": "w"}, "'item_reference'"),
        ({"type": {}}, "items of type '{}'"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": None}, "input[0].content"),
        ({"role": "user", "content": ["x"]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "'input_file'"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "'input_audio'"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "file_id"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "image_url"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": "c"}, "input[0].output"),
        ({"type": "reasoning", "content": "x"}, "input[0].content"),
    ],
)
def test_items_that_are_not_understood_are_named(item: dict[str, Any], named: str) -> None:
    engine = FakeEngine()
    answer = respond(make_app(engine), input=[item])
    assert (answer.status, answer.error["param"]) == (400, "input")
    assert named in answer.error["message"]
    assert (engine.streams, engine.reserved) == ([], 0)


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


def test_a_conversation_goes_on() -> None:
    engine = FakeEngine(script=says("one"))
    app = make_app(engine)
    first = respond(app, input="hi", instructions="A").json["id"]
    engine.script = says("two")
    second = respond(app, input="and", previous_response_id=first, instructions="B").json
    assert prompt_of(engine).replace("<|im_start|>", "").replace("<|im_end|>\n", "|") == (
        "system\nB|user\nhi|assistant\none|user\nand|assistant\n"
    )
    items = get(app, f"{second['id']}/input_items").json
    shown = [part["text"] for item in reversed(items["data"]) for part in item["content"]]
    assert (shown, items["has_more"]) == (["hi", "one", "and"], False)
    count = run(call(app, "POST", PATH + "/input_tokens", {"model": MODEL, "previous_response_id": second["id"]})).json
    third = respond(app, input=None, previous_response_id=second["id"]).json
    assert count == {"object": "response.input_tokens", "input_tokens": third["usage"]["input_tokens"]}
    lost = respond(app, previous_response_id="resp_x")
    assert (lost.status, lost.error["param"]) == (404, "previous_response_id")
    wrong = respond(app, input=[{"type": "x"}], previous_response_id=second["id"])
    assert "input[0]" in wrong.error["message"]


def test_items_are_listed_in_pages() -> None:
    app = make_app(FakeEngine())
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    response_id = respond(app, input=items).json["id"]

    def page(query: str) -> tuple[list[str], bool, dict[str, Any]]:
        exchange = Exchange(app, "GET", f"{PATH}/{response_id}/input_items")
        exchange.scope["query_string"] = query.encode()
        exchange.give(b"")
        found = run(exchange.run()).json
        return [item["content"][0]["text"] for item in found.get("data", [])], found.get("has_more"), found

    texts, more, first = page("limit=2&order=asc")
    assert (texts, more, first["last_id"]) == (["0", "1"], True, first["data"][1]["id"])
    assert page(f"limit=2&order=asc&after={first['last_id']}")[:2] == (["2", "3"], True)
    assert page("limit=100")[:2] == (["4", "3", "2", "1", "0"], False)
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=x"):
        assert page(query)[2]["error"]["param"] == query.split("=")[0]


def test_the_oldest_turns_make_room() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    turns = [{"role": "user", "content": f"{number}" * 100} for number in range(9)]
    items = [{"role": "system", "content": "s"}, *turns]
    assert respond(app, input=items, truncation="disabled").error["code"] == "context_length_exceeded"
    assert respond(app, input=items, truncation="auto").status == 200
    prompt = prompt_of(engine)
    assert prompt.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n5")
    assert all(f"{number}" * 100 in prompt for number in (5, 6, 7, 8))
    assert respond(app, input="x" * 600, truncation="auto").error["code"] == "context_length_exceeded"


def test_a_response_in_the_background() -> None:
    async def work() -> None:
        engine = FakeEngine(script=says("hello world"), delay=0.002)
        app = make_app(engine)
        begun = (await call(app, "POST", PATH, {"model": MODEL, "input": "hi", "background": True})).json
        assert (begun["status"], begun["output"]) == ("queued", [])
        again = await call(app, "POST", PATH, {"model": MODEL, "input": "x", "previous_response_id": begun["id"]})
        assert (again.status, again.error["param"]) == (400, "previous_response_id")
        for _ in range(500):
            found = (await call(app, "GET", f"{PATH}/{begun['id']}")).json
            if found["status"] == "completed":
                break
            assert found["status"] in ("queued", "in_progress")
            await asyncio.sleep(0.005)
        assert found["output"][0]["content"][0]["text"] == "hello world"
        cancelled = await call(app, "POST", f"{PATH}/{begun['id']}/cancel")
        assert (cancelled.json["status"], engine.cancelled) == ("completed", 0)

    run(work())


def test_what_is_made_in_the_background_can_be_cancelled() -> None:
    async def work() -> None:
        engine = FakeEngine(script=says("hello world"), hold_after=3)
        app = make_app(engine)
        for wait in (0.0, 0.05):
            body = {"model": MODEL, "input": "hi", "background": True}
            response_id = (await call(app, "POST", PATH, body)).json["id"]
            await asyncio.sleep(wait)
            assert (await call(app, "DELETE", f"{PATH}/{response_id}")).status == 400
            assert (await call(app, "POST", f"{PATH}/{response_id}/cancel")).json["status"] == "cancelled"
            assert (await call(app, "GET", f"{PATH}/{response_id}")).json["status"] == "cancelled"
            assert (engine.live, engine.reserved) == (0, 0)
        assert engine.cancelled == 2
        synchronous = (await call(make_app(FakeEngine()), "POST", PATH, {"model": MODEL, "input": "hi"})).json["id"]
        assert (await call(app, "POST", f"{PATH}/{synchronous}/cancel")).status == 404

    run(work())


def test_only_background_responses_can_be_cancelled() -> None:
    app = make_app(FakeEngine())
    answer = run(call(app, "POST", f"{PATH}/{respond(app).json['id']}/cancel"))
    assert answer.status == 400


def test_a_failure_in_mid_stream_is_told_and_kept() -> None:
    def script(request: Any, choice: int) -> list[Any]:
        return [*says("hello world")(request, choice)[:3], InternalError("broken")]

    app = make_app(FakeEngine(script=script))
    events = events_of(respond(app, stream=True))
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "broken"}
    assert get(app, last["response"]["id"]).json["status"] == "failed"
    whole = respond(app)
    assert (whole.status, whole.error["message"]) == (500, "broken")


def test_a_client_that_leaves_cancels_its_response() -> None:
    async def work() -> None:
        engine = FakeEngine(script=says("hello world"), hold_after=3)
        app = make_app(engine)
        exchange = Exchange(app, "POST", PATH)
        exchange.header("content-type", "application/json")
        exchange.give(json.dumps({"model": MODEL, "input": "hi", "stream": True}).encode())
        running = asyncio.ensure_future(exchange.run())
        while b"output_text.delta" not in exchange.answer.body:
            await asyncio.sleep(0.001)
        response_id = json.loads(exchange.answer.body.split(b"\n")[1][6:])["response"]["id"]
        assert (await call(app, "GET", f"{PATH}/{response_id}")).json["status"] == "in_progress"
        exchange.leave()
        await running
        assert (await call(app, "GET", f"{PATH}/{response_id}")).json["status"] == "cancelled"
        assert engine.live == 0

    run(work())


def test_responses_belong_to_their_key() -> None:
    app = make_app(FakeEngine(), api_key=("ann", "bob"))
    ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    response_id = respond(app, ann).json["id"]
    assert get(app, response_id, ann).status == 200
    for answer in (
        get(app, response_id, bob),
        respond(app, bob, previous_response_id=response_id),
        run(call(app, "DELETE", f"{PATH}/{response_id}", headers=bob)),
        run(call(app, "POST", f"{PATH}/{response_id}/cancel", headers=bob)),
        get(app, f"{response_id}/input_items", bob),
    ):
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")
    assert run(call(app, "DELETE", f"{PATH}/{response_id}", headers=ann)).json["deleted"] is True
    assert get(app, response_id, ann).status == 404


def test_responses_are_kept_only_where_that_is_wanted() -> None:
    app = make_app(FakeEngine(), max_stored_response_bytes=4096)
    assert get(app, respond(app, store=False).json["id"]).status == 404
    large = {"input": "x" * 400, "instructions": "y"}
    padded = [{"role": "user", "content": "x", "note": "z" * 4096}]
    assert respond(app, **large).status == 200
    refused = respond(app, input=padded)
    assert (refused.status, refused.error["param"]) == (400, "store")
    assert respond(app, input=padded, store=False).status == 200


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


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FUNCTION = {
    "type": "function",
    "name": "get_weather",
    "description": "d",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


def test_calls_of_functions_are_items() -> None:
    engine = FakeEngine(script=says(f"Well. {CALL}\n{CALL}"), max_model_len=4096)
    app = make_app(engine, tool_call_parser="hermes")
    found = respond(app, tools=[FUNCTION], tool_choice="auto", parallel_tool_calls=True).json
    text, first, second = found["output"]
    assert text["content"][0]["text"] == "Well."
    assert (first["type"], first["name"], first["arguments"]) == ("function_call", "get_weather", '{"city":"Paris"}')
    assert first["call_id"] != second["call_id"]
    assert (found["status"], found["tools"]) == ("completed", [FUNCTION])
    events = events_of(respond(app, tools=[FUNCTION], stream=True))
    assert kinds_of(events)[8:15] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
    ]
    assert [event["output_index"] for event in events if event["type"].endswith("item.added")] == [0, 1, 2]
    given = [event for event in events if event["type"].endswith("arguments.delta") and event["output_index"] == 1]
    assert "".join(event["delta"] for event in given) == first["arguments"]
    last = events[-1]["response"]["output"]
    assert [_without_call_ids(item) for item in last] == [_without_call_ids(item) for item in found["output"]]


def _without_call_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def test_results_of_functions_go_back() -> None:
    engine = FakeEngine(script=says(CALL), max_model_len=4096)
    app = make_app(engine, tool_call_parser="hermes")
    first = respond(app, tools=[FUNCTION]).json
    (call_item,) = first["output"]
    result = {"type": "function_call_output", "call_id": call_item["call_id"], "output": "sunny"}
    assert respond(app, tools=[FUNCTION], previous_response_id=first["id"], input=[result]).status == 200
    assert "<|im_start|>user\nResult of get_weather:\nsunny<|im_end|>" in prompt_of(engine)
    lost = respond(app, input=[result])
    assert (lost.status, lost.json["error"]["param"]) == (400, "input")


def test_reasoning_is_an_item() -> None:
    template = TEMPLATE + "{# <think> </think> #}"
    engine = FakeEngine(script=says("<think>hm</think>yes"))
    app = make_app(engine, make_tokenizer(template=template))
    found = respond(app).json
    assert [(item["type"], item["content"][0]["text"]) for item in found["output"]] == [
        ("reasoning", "hm"),
        ("message", "yes"),
    ]
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    kinds = kinds_of(events_of(respond(app, stream=True)))
    assert kinds[2:6] == ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"]
