"""Image messages through the routes: order, counts, usage, limits, and what is refused before anything is decoded."""

import asyncio
import base64
import json
from typing import Any

import pytest

from server.api.body import Limits, check_size, parse
from server.errors import BadRequest
from server.schema.chat import ChatBody
from tests.server.exchange import Answer, Exchange, call, chat, complete, run
from tests.server.fakes import MODEL, FakeEngine, make_app, says
from tests.server.image_fakes import FAMILIES, image_app, image_part, prepared
from tests.server.test_metrics import scrape

PNG = "data:image/png;base64,"


def user(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_the_sdks_message_with_images() -> None:
    """In both forms, in order; the engine gets pixels, spans and positions, and usage counts the tokens."""
    engine = FakeEngine(script=says("hello"))
    app, pipeline = image_app(engine)
    messages = [user(text("what is"), image_part("data:28x56"), {"type": "image_url", "image_url": "data:56x56"})]
    answer = chat(app, messages=messages, cache_salt="s")
    assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, "hello")
    assert pipeline.calls == [(["data:28x56", "data:56x56"], b"s")]
    (request,) = engine.requests
    assert [image.key for image in request.images.images] == [prepared(28, 56).key, prepared(56, 56).key]
    assert [span.length for span in request.images.spans] == [2, 4]
    assert len(request.images.rope_positions) == 3 * len(request.prompt_ids)
    usage = answer.json["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_ids)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 6}
    assert scrape(app)["images_received_total"] == 2


def test_usage_of_a_stream_and_of_text() -> None:
    app, pipeline = image_app(FakeEngine())
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    streamed = chat(app, messages=[user(image_part())], **fields)
    assert streamed.events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 2}
    assert chat(app).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert len(pipeline.calls) == 1


def test_choices_share_their_images() -> None:
    engine = FakeEngine(script=says("hello", "hell"))
    app, _ = image_app(engine)
    answer = chat(app, messages=[user(image_part())], n=2)
    assert [choice["message"]["content"] for choice in answer.json["choices"]] == ["hello", "hell"]
    assert [request.n for request in engine.requests] == [2]


@pytest.mark.parametrize("url", ["data:28x56", PNG + "A" * 200_000])
def test_a_model_without_images(url: str) -> None:
    """Short bodies and long ones; nothing is decoded, and no place is kept."""
    engine = FakeEngine()
    answer = chat(make_app(engine), messages=[user(text("x"), image_part(url))])
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert answer.error["message"] == "messages[0].content[1]: this model does not accept images."
    assert (engine.requests, engine.reserved) == ([], 0)


def test_an_image_that_cannot_be_used() -> None:
    engine = FakeEngine()
    app, _ = image_app(engine)
    answer = chat(app, messages=[user(image_part(), image_part("data:nonsense"))], stream=True)
    assert (answer.status, answer.error["code"]) == (400, "corrupt_image")
    assert answer.error["message"] == "image 2: no size"
    assert (engine.requests, engine.reserved) == ([], 0)
    assert chat(app).status == 200


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        ({"type": "image_url"}, "messages[0].content[0]", "needs an object with a 'url'"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url", "a value is required"),
        ({"type": "image_url", "image_url": ""}, "messages[0].content[0].image_url", "at least 1 character"),
        ({"type": "image_url", "image_url": 5}, "messages[0].content[0].image_url", "must be an object"),
        (
            {"type": "image_url", "image_url": {"url": "data:1x1", "detail": "ultra"}},
            "messages[0].content[0].image_url.detail",
            "'auto', 'low' or 'high'",
        ),
        ({"type": "input_audio", "input_audio": {}}, "messages", "does not accept audio"),
        (
            {"type": "image", "image": "x"},
            "messages",
            "type 'image' are not supported; an image has the type 'image_url'",
        ),
        ({"type": "input_image", "image_url": "x"}, "messages", "an image has the type 'image_url'"),
    ],
)
def test_parts_that_are_refused(part: dict[str, object], param: str, words: str) -> None:
    app, pipeline = image_app(FakeEngine())
    answer = chat(app, messages=[user(part)])
    assert (answer.status, answer.error["param"]) == (400, param)
    assert words in answer.error["message"]
    assert pipeline.calls == []


@pytest.mark.parametrize(("detail", "named"), [("low", True), ("high", True), ("auto", False), (None, False)])
def test_a_detail_that_is_not_honoured_is_named(detail: str | None, named: bool) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:28x28", "detail": detail}}
    app, _ = image_app(FakeEngine())
    answer = chat(app, messages=[user(part)], frobnicate=1)
    assert answer.status == 200
    assert answer.headers["x-ignored-params"] == ("frobnicate, image_url.detail" if named else "frobnicate")
    strict, _ = image_app(FakeEngine(), strict_params=True)
    refused = chat(strict, messages=[user(part)])
    assert refused.status == (400 if named else 200)
    assert not named or refused.error["param"] == "image_url.detail"


def test_tokenize_counts_as_generation_does() -> None:
    engine = FakeEngine()
    app, _ = image_app(engine)
    messages = [user(text("what is"), image_part("data:56x84"))]
    counted = run(call(app, "POST", "/tokenize", {"messages": messages}))
    assert chat(app, messages=messages).status == 200
    assert counted.json["tokens"] == engine.requests[0].prompt_ids.tolist()
    assert counted.json["tokens"].count(FAMILIES["qwen2_vl"][1].image_token_id) == 6
    open_end = run(call(app, "POST", "/tokenize", {"messages": messages, "add_generation_prompt": False}))
    assert open_end.json["count"] < counted.json["count"]


def test_completions_know_nothing_of_images() -> None:
    engine = FakeEngine()
    app, _ = image_app(engine)
    assert complete(app, prompt="<|image_pad|>").status == 200
    assert engine.requests[0].images.images == ()


def test_a_client_that_leaves_while_its_image_is_fetched() -> None:
    engine = FakeEngine()
    app, pipeline = image_app(engine)

    async def scenario() -> Answer:
        pipeline.hold = asyncio.Event()
        exchange = Exchange(app, "POST", "/v1/chat/completions")
        exchange.header("content-type", "application/json")
        exchange.give(json.dumps({"model": MODEL, "messages": [user(image_part())]}).encode())
        working = asyncio.create_task(exchange.run())
        while not pipeline.calls:
            await asyncio.sleep(0)
        exchange.leave()
        return await working

    run(scenario())
    assert (engine.requests, engine.reserved) == ([], 0)


LIMITS = Limits(max_model_len=100, max_token_bytes=10, max_prompts=1)


def size_error(messages: list[object], raw: bytes | None = None) -> str | None:
    try:
        check_size(raw or json.dumps({"model": "m", "messages": messages}).encode(), ChatBody, LIMITS)
    except BadRequest as error:
        return error.code
    return None


def test_images_are_no_text() -> None:
    """What a data: URL holds is not counted against the context, all else is."""
    long = PNG + "A" * 100_000
    assert size_error([user(image_part(long), {"type": "image_url", "image_url": long}, text("x" * 500))]) is None
    overflow = "context_length_exceeded"
    assert size_error([user(image_part(long), text("x" * 1100))]) == overflow
    assert size_error([user(text(long))]) == overflow
    assert size_error([user(text(json.dumps({"url": long})))]) == overflow
    assert size_error([user({"type": "text", "text": "x", "other": long})]) == overflow
    spaced = json.dumps({"messages": [user(image_part(long))]}, separators=(" ,\n", "\t:  "))
    assert size_error([], spaced.encode()) is None
    escaped = json.dumps({"messages": [user(image_part(long + "/+" * 50_000))]}).replace("/", "\\/")
    assert size_error([], escaped.encode()) is None
    many = [user(*[image_part(PNG + "A" * 200)] * 1024)]
    assert size_error([user(text("x" * 150_000))]) == overflow
    assert size_error(many) == overflow, "the objects around the URLs are counted"


def test_base64_that_spells_a_constant_is_no_constant() -> None:
    url = PNG + base64.b64encode(b"5\xa3" * 3).decode() + "NaNInfinity"
    assert parse(json.dumps({"messages": [user(image_part(url))]}).encode())["messages"][0]["content"]
    for constant in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(BadRequest, match="logprobs holds NaN or Infinity"):
            parse(f'{{"model": "NaN", "logprobs": [{constant}]}}'.encode())


def test_the_document_describes_images() -> None:
    app, _ = image_app(FakeEngine())
    schemas = run(call(app, "GET", "/openapi.json")).json["components"]["schemas"]
    assert schemas["ImageUrl"]["required"] == ["url"]
    kinds = [option["properties"]["type"]["const"] for option in schemas["ContentPart"]["anyOf"]]
    assert kinds == ["text", "image_url"]
