"""Images of the Responses and the Messages API: the same images as those of chat, and large bodies that hold them."""

import json
from typing import Any

import pytest
from fastapi import FastAPI

from server.api.body import Limits, check_size
from server.errors import BadRequest
from server.schema.messages import MessagesBody
from server.schema.responses import ResponsesBody
from tests.server.exchange import Answer, call, chat, run
from tests.server.fakes import MODEL, FakeEngine, make_app
from tests.server.image_fakes import image_app, image_part

LIMITS = Limits(max_model_len=512, max_token_bytes=8, max_prompts=1)


def respond(app: FastAPI, content: list[Any], path: str = "") -> Answer:
    body = {"model": MODEL, "input": [{"role": "user", "content": content}]}
    return run(call(app, "POST", "/v1/responses" + path, body))


def send(app: FastAPI, content: list[Any], path: str = "") -> Answer:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]} | ({} if path else {"max_tokens": 20})
    return run(call(app, "POST", "/v1/messages" + path, body))


def test_images_are_those_of_chat() -> None:
    engine = FakeEngine()
    app, pipeline = image_app(engine)
    words = "what is"
    asked = [{"type": "text", "text": words}, image_part("data:28x56"), image_part("data:56x56")]
    chat(app, messages=[{"role": "user", "content": asked}])
    response = respond(
        app,
        [
            {"type": "input_text", "text": words},
            {"type": "input_image", "image_url": "data:28x56", "detail": "auto"},
            {"type": "input_image", "image_url": "data:56x56"},
        ],
    )
    blocks = [
        {"type": "text", "text": words},
        {"type": "image", "source": {"type": "url", "url": "data:28x56"}},
        {"type": "image", "source": {"type": "url", "url": "data:56x56"}},
    ]
    message = send(app, blocks)
    first, second, third = engine.requests
    assert first.prompt_ids == second.prompt_ids == third.prompt_ids
    assert first.images.spans == second.images.spans == third.images.spans
    tokens = len(first.prompt_ids)
    assert response.json["usage"]["input_tokens"] == message.json["usage"]["input_tokens"] == tokens
    assert send(app, blocks, "/count_tokens").json == {"input_tokens": tokens}
    assert [urls for urls, _ in pipeline.calls] == [["data:28x56", "data:56x56"]] * 4
    assert engine.reserved == 0


def test_base64_is_a_data_url() -> None:
    app, pipeline = image_app(FakeEngine())
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    answer = send(app, [{"type": "image", "source": source}])
    assert answer.status == 400  # the fake knows sizes only
    assert pipeline.calls[0][0] == ["data:image/png;base64,AAAA"]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}
    call_block = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    body = {
        "model": MODEL,
        "max_tokens": 5,
        "messages": [{"role": "assistant", "content": [call_block]}, {"role": "user", "content": [result]}],
    }
    run(call(app, "POST", "/v1/messages", body))
    assert pipeline.calls[1][0] == ["data:image/png;base64,AAAA"]


def test_a_conversation_keeps_its_images() -> None:
    app, pipeline = image_app(FakeEngine())
    first = respond(app, [{"type": "input_image", "image_url": "data:28x56"}]).json["id"]
    body = {"model": MODEL, "input": "and", "previous_response_id": first}
    assert run(call(app, "POST", "/v1/responses", body)).status == 200
    assert [urls for urls, _ in pipeline.calls] == [["data:28x56"]] * 2


def test_images_of_turns_that_are_left_out_are_left_out() -> None:
    engine = FakeEngine()
    app, _ = image_app(engine)
    turns = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": f"data:{size}"}],
        }
        for text, size in (("one " * 100, "28x56"), ("two " * 60, "56x56"))
    ]
    for kept in (turns, turns[1:]):
        body = {"model": MODEL, "input": kept, "truncation": "auto"}
        assert run(call(app, "POST", "/v1/responses", body)).status == 200
    first, second = engine.requests
    assert first.prompt_ids == second.prompt_ids
    assert [image.key for image in first.images.images] == [image.key for image in second.images.images]
    assert len(first.images.images) == 1


def test_a_model_without_images() -> None:
    app = make_app(FakeEngine())
    refused = respond(app, [{"type": "input_image", "image_url": "data:28x56"}])
    assert (refused.status, refused.error["param"]) == (400, "input")
    assert send(app, [{"type": "image", "source": {"type": "url", "url": "data:28x56"}}]).status == 400


@pytest.mark.parametrize("spaces", ["", " "])
def test_images_of_large_bodies_are_no_text(spaces: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 200_000}
    image = {"type": "image", "source": source}
    separators = ("," + spaces, ":" + spaces)

    def message(*blocks: object) -> bytes:
        talk = [{"role": "user", "content": list(blocks)}]
        return json.dumps({"model": MODEL, "max_tokens": 5, "messages": talk}, separators=separators).encode()

    check_size(message(image, image), MessagesBody, LIMITS)
    with pytest.raises(BadRequest, match="maximum context length"):
        check_size(message(image, {"type": "text", "text": "x" * 200_000}), MessagesBody, LIMITS)
    with pytest.raises(BadRequest, match="maximum context length"):
        check_size(message({"type": "text", "text": '"data":"' + "x" * 200_000}), MessagesBody, LIMITS)
    url = "data:image/png;base64," + "A" * 200_000
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    check_size(json.dumps({"model": MODEL, "input": items}, separators=separators).encode(), ResponsesBody, LIMITS)
    items[0]["content"] = url
    with pytest.raises(BadRequest, match="maximum context length"):
        check_size(json.dumps({"model": MODEL, "input": items}).encode(), ResponsesBody, LIMITS)


def test_deep_nesting_is_refused() -> None:
    app = make_app(FakeEngine())
    nested: Any = 0
    for _ in range(800):
        nested = [nested]
    for fields in (
        {"input": [{"role": "user", "content": "x", "note": nested}]},
        {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"x": nested}}]},
        {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"x": nested}}}},
        {"input": "x", "tool_choice": {"type": "function", "x": nested}},
    ):
        answer = run(call(app, "POST", "/v1/responses", {"model": MODEL} | fields))
        assert answer.status == 400 and "levels deep" in answer.error["message"]
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": nested}}
    talk = [{"role": "assistant", "content": [block]}]
    answer = run(call(app, "POST", "/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": talk}))
    assert answer.status == 400 and "levels deep" in answer.json["error"]["message"]
    hi = [{"role": "user", "content": "hi"}]
    tag = {"begin": "<a>", "schema": {"x": nested}, "end": "</a>"}
    for path, fields in (
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "x": nested}}]}),
        ("/v1/chat/completions", {"structured_outputs": {"structural_tag": {"structures": [tag], "triggers": ["<"]}}}),
        ("/tokenize", {"tools": [{"type": "function", "function": {"name": "f"}, "x": nested}]}),
    ):
        answer = run(call(app, "POST", path, {"model": MODEL, "messages": hi} | fields))
        assert answer.status == 400 and answer.error["param"] == next(iter(fields))
        assert "levels deep" in answer.error["message"]
