"""What the gateway refuses, and that it says so in OpenAI's words, whatever it is sent."""

import json
import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.schema.chat import ChatBody
from server.schema.completions import CompletionBody
from server.schema.tokens import TokenizeBody
from tests.server.exchange import call, chat, complete, run
from tests.server.fakes import FakeEngine, make_app

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def post(raw: bytes, path: str = CHAT, **options: Any) -> Any:
    return run(call(make_app(FakeEngine(), **options), "POST", path, raw))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", 10**400),
        ("temperature", [0.5]),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 2),
        ("n", 0),
        ("n", -1),
        ("n", 1000),
        ("n", True),
        ("n", "2"),
        ("n", 10**30),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.5),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 10**30),
        ("max_tokens", "5"),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ["x"] * 10_000),
        ("stop", [""]),
        ("stop", ""),
        ("stop", 5),
        ("stop", [["a"]]),
        ("stop", "x" * 2000),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", list(range(200))),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", [1]),
        ("bad_words", [""]),
        ("bad_words", "x"),
        ("logprobs", 3),
        ("logprobs", "yes"),
        ("top_logprobs", 5),
        ("stream", "true"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("priority", 2**40),
        ("priority", "high"),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("request_id", "a b"),
        ("request_id", "x" * 200),
        ("ignore_eos", "no"),
        ("messages", []),
        ("messages", None),
        ("messages", "hi"),
        ("messages", [[]]),
        ("messages", {}),
        ("model", None),
        ("model", 5),
        ("model", ""),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tools", []),
        ("tool_choice", "auto"),
        ("tool_choice", "required"),
        ("functions", []),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "sound"}),
        ("structured_outputs", {"json": {}}),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "a"}),
        ("best_of", 2),
        ("best_of", True),
        ("prompt_logprobs", 1),
        ("chat_template", "x"),
        ("echo", True),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    engine = FakeEngine()
    answer = chat(make_app(engine), **{field: value})
    assert answer.status == 400
    assert answer.error["param"].split("[")[0].split(".")[0] == field
    assert answer.error["type"] == "invalid_request_error"
    assert (engine.streams, engine.reserved) == ([], 0)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "king", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0]"),
        ({"role": "user", "content": None}, "messages[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "tool", "content": "x"}, "messages[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}, None),
    ],
)
def test_bad_messages_are_refused_by_place(message: object, param: str | None) -> None:
    answer = chat(make_app(FakeEngine()), messages=[message])
    assert answer.status == 400
    assert answer.error["param"] == (param or "messages[0].tool_calls[0].function.arguments")


def test_images_are_refused_clearly() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = chat(make_app(FakeEngine()), messages=[{"role": "user", "content": [part]}])
    assert answer.status == 400
    assert "images" in answer.error["message"]


@pytest.mark.parametrize("field", ["suffix", "prompt_embeds", "use_beam_search"])
def test_completions_refuse_what_would_be_wrong_to_ignore(field: str) -> None:
    answer = complete(make_app(FakeEngine()), **{field: "x"})
    assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize("value", [True, 6, -1, "1"])
def test_completions_logprobs_is_a_small_integer(value: object) -> None:
    assert complete(make_app(FakeEngine()), logprobs=value).error["param"] == "logprobs"


def test_top_logprobs_up_to_20() -> None:
    app = make_app(FakeEngine())
    assert chat(app, logprobs=True, top_logprobs=20).status == 200
    assert chat(app, logprobs=True, top_logprobs=21).error["param"] == "top_logprobs"


def test_stream_options_with_unknown_keys_are_refused() -> None:
    answer = chat(make_app(FakeEngine()), stream=True, stream_options={"include_nothing": True})
    assert answer.error["param"] == "stream_options.include_nothing"


def test_min_tokens_above_max_tokens() -> None:
    assert chat(make_app(FakeEngine()), min_tokens=5, max_tokens=4).error["param"] == "min_tokens"


def test_unknown_model() -> None:
    answer = chat(make_app(FakeEngine()), model="gpt-x")
    assert answer.status == 404
    assert answer.error == {
        "message": "The model `gpt-x` does not exist.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_harmless_and_neutral_parameters_pass_silently() -> None:
    fields: dict[str, object] = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "verbosity": "low",
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "best_of": 1,
        "modalities": ["text"],
    }
    for strict in (False, True):
        answer = chat(make_app(FakeEngine(), strict_params=strict), **fields)
        assert answer.status == 200
        assert "x-ignored-params" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_ignored_parameters_are_named(stream: bool) -> None:
    fields = {"zebra": 1, "mirostat": 2, "bad\nname": 1, "null": None}
    answer = chat(make_app(FakeEngine()), stream=stream, **fields)
    assert answer.status == 200
    assert answer.headers["x-ignored-params"] == "(unprintable), mirostat, zebra"
    strict = chat(make_app(FakeEngine(), strict_params=True), stream=stream, zebra=1)
    assert (strict.status, strict.error["param"]) == (400, "zebra")


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
