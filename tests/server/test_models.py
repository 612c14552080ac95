"""The small routes: models, tokens, health, and the OpenAPI document."""

import time

from server.errors import Unavailable
from tests.server.exchange import Answer, call, chat, run
from tests.server.fakes import MAX_MODEL_LEN, FakeEngine, ids_of, make_app, make_stats


def get(path: str, engine: FakeEngine | None = None, **options: object) -> Answer:
    return run(call(make_app(engine or FakeEngine(), **options), "GET", path))


def post(path: str, **body: object) -> Answer:
    return run(call(make_app(FakeEngine()), "POST", path, body))


def test_models() -> None:
    document = get("/v1/models", served_model_name="org/big,small").json
    assert document["object"] == "list"
    assert [card["id"] for card in document["data"]] == ["org/big", "small"]
    assert {card["object"] for card in document["data"]} == {"model"}
    assert {card["max_model_len"] for card in document["data"]} == {MAX_MODEL_LEN}
    one = get("/v1/models/org/big", served_model_name="org/big,small").json
    assert one["id"] == "org/big"
    assert isinstance(one["created"], int)
    missing = get("/v1/models/other")
    assert (missing.status, missing.error["code"], missing.error["param"]) == (404, "model_not_found", "model")


def test_models_are_listed_while_loading() -> None:
    assert get("/v1/models", FakeEngine(unready=Unavailable("loading"))).json["data"][0]["max_model_len"] is None


def test_tokenize_and_back() -> None:
    document = post("/tokenize", prompt="hello <|im_end|>", return_token_strs=True).json
    assert document["tokens"] == [*ids_of("hello "), 2]
    assert (document["count"], document["max_model_len"]) == (3, MAX_MODEL_LEN)
    assert document["token_strs"] == ["hello", " ", "<|im_end|>"]
    assert post("/detokenize", tokens=document["tokens"]).json == {"prompt": "hello <|im_end|>"}
    assert post("/tokenize", prompt="").json["tokens"] == []
    assert post("/detokenize", tokens=[]).json == {"prompt": ""}


def test_tokenize_counts_a_conversation_as_chat_does() -> None:
    messages = [{"role": "user", "content": "hi"}]
    document = post("/tokenize", messages=messages).json
    assert document["count"] == chat(make_app(FakeEngine())).json["usage"]["prompt_tokens"]
    shorter = post("/tokenize", messages=messages, add_generation_prompt=False).json
    assert shorter["tokens"] == document["tokens"][: shorter["count"]]
    assert shorter["count"] < document["count"]
    told = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
    for fields in (told, told | {"tool_choice": "none"}):
        engine = FakeEngine()
        assert chat(make_app(engine), **fields).status == 200
        tokens = post("/tokenize", messages=messages, **fields).json["tokens"]
        assert tokens == engine.requests[0].prompt_ids.tolist()
        assert (tokens == document["tokens"]) == ("tool_choice" in fields)


def test_token_routes_refuse() -> None:
    assert post("/tokenize").error["param"] == "prompt"
    assert post("/tokenize", prompt="a", messages=[{"role": "user", "content": "a"}]).error["param"] == "prompt"
    assert post("/tokenize", prompt=5).error["param"] == "prompt"
    assert post("/tokenize", prompt="a", model="other").status == 404
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert post("/tokenize", prompt="a", tools=tools).error["param"] == "tools"
    assert post("/tokenize", messages=[{"role": "user", "content": "a"}], tools=tools * 2).error["param"] == "tools"
    assert post("/detokenize").error["param"] == "tokens"
    assert post("/detokenize", tokens=[10**6]).error["param"] == "tokens"
    assert post("/detokenize", tokens=["a"]).error["param"] == "tokens[0]"
    assert post("/detokenize", tokens=[], model="other").status == 404


def test_ready() -> None:
    assert get("/health/ready").json == {"status": "ok"}
    engine = FakeEngine(places=0)
    assert get("/health/ready", engine).status == 200
    engine = FakeEngine(unready=Unavailable("the model is loading"))
    assert get("/health", engine).status == 503
    answer = get("/health/ready", engine)
    assert (answer.status, answer.error["message"]) == (503, "the model is loading")
    assert int(answer.headers["retry-after"]) >= 1
    assert get("/health/live", engine).status == 200


def test_ready_takes_no_place() -> None:
    engine = FakeEngine()
    get("/health/ready", engine)
    assert engine.reserved == 0


def test_progress() -> None:
    stats = make_stats(busy=True, running=2, waiting=3, free_blocks=60, last_step_time=time.monotonic() - 5)
    document = get("/health/progress", FakeEngine(stats=stats)).json
    assert (document["status"], document["running"], document["waiting"]) == ("busy", 2, 3)
    assert (document["free_blocks"], document["total_blocks"]) == (60, 100)
    assert 5 <= document["last_step_age_seconds"] < 10
    assert get("/health/progress", FakeEngine(stats=make_stats(last_step_time=0))).json["last_step_age_seconds"] is None
    assert get("/health/progress", FakeEngine(stats=None)).json == {"status": "no engine"}


def test_openapi_document_holds_the_bodies() -> None:
    document = get("/openapi.json").json
    bodies = {
        path: operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
        for path, item in document["paths"].items()
        if "requestBody" in (operation := item.get("post", {}))
    }
    assert bodies == {
        "/v1/chat/completions": "ChatBody",
        "/v1/chat/completions/input_tokens": "ChatBody",
        "/v1/completions": "CompletionBody",
        "/v1/embeddings": "EmbeddingsBody",
        "/v1/messages": "MessagesBody",
        "/v1/messages/count_tokens": "CountTokensBody",
        "/v1/responses": "ResponsesBody",
        "/v1/responses/input_tokens": "CountBody",
        "/tokenize": "TokenizeBody",
        "/detokenize": "DetokenizeBody",
    }
    schemas = document["components"]["schemas"]
    assert schemas["ChatBody"]["required"] == ["model", "messages"]
    assert schemas["CompletionBody"]["properties"]["temperature"]["anyOf"][0] == {
        "maximum": 2,
        "minimum": 0,
        "type": "number",
    }
    text = str(document)
    for name in schemas:
        assert text.count(f"#/components/schemas/{name}'") or name in bodies.values()
    assert {path for path, item in document["paths"].items() if "get" in item} == {
        "/v1/models",
        "/v1/models/{model_id}",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/health/live",
        "/health",
        "/health/ready",
        "/health/progress",
        "/metrics",
    }
