"""Whatever the gateway is sent, it answers in OpenAI's words: malformed bodies, unknown paths, faults of ours."""

import json
import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.schema.chat import ChatBody
from server.schema.completions import CompletionBody
from server.schema.tokens import TokenizeBody
from tests.server.exchange import call, chat, run
from tests.server.fakes import FakeEngine, make_app

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def post(raw: bytes, path: str = CHAT, **options: Any) -> Any:
    return run(call(make_app(FakeEngine(), **options), "POST", path, raw))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b"nonsense",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "tiny", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "tiny", "temperature": -Infinity, "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x", "\\udc00": 1}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "\\ud800": 1}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "model": "tiny", "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "tiny", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 50_000,
        '{"model": "tiny"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]} trailing',
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_malformed_bodies_are_400(raw: bytes, path: str) -> None:
    answer = post(raw, path)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


def test_a_number_too_large_for_a_float_is_refused() -> None:
    answer = post(b'{"model": "tiny", "temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}')
    assert (answer.status, answer.error["param"]) == (400, "temperature")


def test_escaped_surrogate_pairs_are_text() -> None:
    raw = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83d\\udc69"}]}'
    assert post(raw).status == 200


def test_messages_never_repeat_the_payload() -> None:
    secret = "swordfish" * 500
    for fields in (
        {"temperature": secret},
        {"stop": [secret] * 9},
        {"model": secret},
        {"messages": [{"role": secret}] * 99},
    ):
        answer = chat(make_app(FakeEngine()), **fields)
        assert answer.status in (400, 404)
        assert len(answer.body) < 700
        assert answer.body.count(b"swordfish") <= 12
    many = chat(make_app(FakeEngine()), temperature="a", top_p="a", top_k="a", min_p="a", n="a")
    assert "(2 more)" in many.error["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_content_type_must_be_json(content_type: str) -> None:
    app = make_app(FakeEngine())
    answer = run(call(app, "POST", CHAT, b"{}", headers={"content-type": content_type}))
    assert answer.status == 415
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("identity", 200)])
def test_compressed_bodies_are_refused_by_name(encoding: str, status: int) -> None:
    body = {"model": "tiny", "messages": HI}
    answer = run(call(make_app(FakeEngine()), "POST", CHAT, body, headers={"content-encoding": encoding}))
    assert answer.status == status
    assert status == 200 or answer.error["message"] == "The body must not be compressed."


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"])
def test_json_content_types(content_type: str) -> None:
    body = {"model": "tiny", "messages": HI}
    app = make_app(FakeEngine())
    assert run(call(app, "POST", CHAT, body, headers={"content-type": content_type})).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/health/live", 405),
        ("GET", "/tokenize", 405),
        ("GET", "/docs", 404),
    ],
)
def test_unknown_paths_and_methods(method: str, path: str, status: int) -> None:
    answer = run(call(make_app(FakeEngine()), method, path))
    assert answer.status == status
    assert answer.error["type"] == "invalid_request_error"
    assert ("allow" in answer.headers) == (status == 405)


def test_a_fault_of_ours_is_a_plain_500(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: object, choice: int) -> Any:
        raise RuntimeError("a secret")

    engine = FakeEngine(script=broken)
    with caplog.at_level(logging.ERROR):
        answer = chat(make_app(engine))
    assert answer.status == 500
    assert answer.error["message"] == "The server had an error."
    assert answer.complete
    assert "a secret" in caplog.text
    assert engine.reserved == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(sorted(ChatBody.model_fields | CompletionBody.model_fields | TokenizeBody.model_fields))
APP = make_app(FakeEngine(), access_log=False)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from([CHAT, "/v1/completions", "/tokenize", "/detokenize"]),
    fields=st.dictionaries(NAMES | st.text(max_size=5), JSON, max_size=3),
    whole=st.booleans(),
)
def test_any_json_gets_an_answer_below_500(path: str, fields: dict[str, Any], whole: bool) -> None:
    base: dict[str, Any] = {"model": "tiny", "messages": HI} if path == CHAT else {"model": "tiny", "prompt": "hi"}
    body = fields if whole else base | fields
    answer = run(call(APP, "POST", path, json.dumps(body).encode()))
    assert answer.status in (200, 400, 404), answer.body
    if answer.status != 200:
        assert isinstance(answer.error["message"], str)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=st.binary(max_size=60))
def test_any_bytes_get_400(raw: bytes) -> None:
    assert run(call(APP, "POST", CHAT, raw)).status == 400
