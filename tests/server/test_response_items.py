"""The items of /v1/responses: what becomes of those that are sent, and which of them an answer has."""

from typing import Any

import pytest

from tests.server.fakes import CALL, TEMPLATE, FakeEngine, make_app, make_tokenizer, says
from tests.server.responses_case import events_of, kinds_of, prompt_of, respond

FUNCTION = {
    "type": "function",
    "name": "get_weather",
    "description": "d",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


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
        ({"role": "user", "content": [{"type": []}]}, "input[0].content[0]: parts of type '[]'"),
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
