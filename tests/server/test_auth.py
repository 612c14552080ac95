"""API keys, CORS, request ids and the access log."""

import logging

import pytest

from tests.server.exchange import Answer, call, chat, run
from tests.server.fakes import FakeEngine, make_app

KEYS = ("first-key", "second-key")


def get(path: str, authorization: str | None = None, keys: tuple[str, ...] = KEYS, method: str = "GET") -> Answer:
    headers = {} if authorization is None else {"authorization": authorization}
    return run(call(make_app(FakeEngine(), api_key=keys), method, path, headers=headers))


@pytest.mark.parametrize("authorization", ["Bearer first-key", "bearer second-key", "BEARER  first-key "])
def test_known_keys(authorization: str) -> None:
    assert get("/v1/models", authorization).status == 200


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "Bearer nope", "Bearer first-key2", "Basic first-key", "first-key"]
)
def test_unknown_keys(authorization: str | None) -> None:
    answer = get("/v1/models", authorization)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert (answer.error["type"], answer.error["code"]) == ("invalid_request_error", "invalid_api_key")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models/tiny"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/nothing"),
    ],
)
def test_all_routes_need_a_key(method: str, path: str) -> None:
    assert get(path, method=method).status == 401


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/health/progress"])
def test_health_needs_no_key(path: str) -> None:
    assert get(path).status == 200


def test_without_keys_everybody_may_ask() -> None:
    assert get("/v1/models", keys=()).status == 200


def test_refused_requests_take_no_place() -> None:
    engine = FakeEngine(places=0)
    answer = chat(make_app(engine, api_key=KEYS))
    assert answer.status == 401


def test_empty_keys_are_a_configuration_error() -> None:
    with pytest.raises(ValueError, match="api_key"):
        make_app(FakeEngine(), api_key=("",))


def test_cors() -> None:
    app = make_app(FakeEngine(), api_key=KEYS, cors_allow_origins=("https://page.example",))
    preflight = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    answer = run(call(app, "OPTIONS", "/v1/chat/completions", headers=preflight))
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    refused = run(call(app, "GET", "/v1/models", headers={"origin": "https://page.example"}))
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
    assert "x-request-id" in refused.headers["access-control-expose-headers"]
    other = run(call(app, "OPTIONS", "/v1/models", headers=preflight | {"origin": "https://other.example"}))
    assert other.status == 400
    plain = run(call(make_app(FakeEngine()), "GET", "/v1/models", headers={"origin": "https://page.example"}))
    assert "access-control-allow-origin" not in plain.headers


@pytest.mark.parametrize("stream", [False, True])
def test_request_ids(stream: bool) -> None:
    app = make_app(FakeEngine())
    made = chat(app, stream=stream).headers["x-request-id"]
    assert len(made) == 32
    assert chat(app, {"x-request-id": "mine-1"}, stream=stream).headers["x-request-id"] == "mine-1"
    assert chat(app, {"x-request-id": "mine-1"}, request_id="body", stream=stream).headers["x-request-id"] == "body"
    for bad in ("a b", "x" * 200, 'a"b', ""):
        assert len(chat(app, {"x-request-id": bad}, stream=stream).headers["x-request-id"]) == 32


def test_access_log(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(FakeEngine(), api_key=("secret-key",))
    with caplog.at_level(logging.INFO, logger="firstlight.access"):
        chat(app, {"authorization": "Bearer secret-key", "x-request-id": "r1"})
        chat(app, {"authorization": "Bearer secret-key", "x-request-id": "r2"}, stream=True)
        run(call(app, "GET", "/no\nsuch\x1bpath"))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    for line, request_id in zip(lines, ("r1", "r2"), strict=False):
        assert line.startswith("POST /v1/chat/completions 200 ")
        assert line.endswith(f"in=21 out=8 id={request_id}")
    assert lines[2].startswith("GET /no\\nsuch\\x1bpath 401 ")
    assert "secret-key" not in caplog.text


def test_access_log_can_be_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="firstlight.access"):
        chat(make_app(FakeEngine(), access_log=False))
    assert caplog.records == []


def test_keys_of_clients_of_both_apis() -> None:
    app = make_app(FakeEngine(), api_key=KEYS)
    for headers in ({"x-api-key": KEYS[0]}, {"x-api-key": KEYS[0], "authorization": ""}):
        assert run(call(app, "GET", "/v1/models", headers=headers)).status == 200
    assert run(call(app, "GET", "/v1/models", headers={"x-api-key": "wrong"})).status == 401


def test_errors_of_each_api_have_its_shape() -> None:
    app = make_app(FakeEngine(), api_key=KEYS)
    ours = run(call(app, "GET", "/v1/messages", headers={"x-request-id": "r1"}))
    assert ours.status == 401
    assert ours.json["error"]["type"] == "authentication_error"
    assert (ours.json["type"], ours.json["request_id"], ours.headers["request-id"]) == ("error", "r1", "r1")
    theirs = run(call(app, "GET", "/v1/messagesx"))
    assert (theirs.status, theirs.error["code"], theirs.headers.get("request-id")) == (401, "invalid_api_key", None)
