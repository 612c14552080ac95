"""Hostile input over a real socket: each mistake gets a 4xx that names its field, and neighbours notice nothing."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.end_to_end.conftest import Server, sse_events
from tests.end_to_end.hostile_bodies import TABLE, Body
from tests.end_to_end.neighbour import Neighbour

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """While a test of this module runs, so does a neighbour; afterwards nothing is left in the engine."""
    with server.client(timeout=30) as made, Neighbour(server):
        yield made
    server.wait_for(server.is_idle, 10, "idleness")


def _error(response: httpx.Response) -> dict[str, Any]:
    """The error object; its shape is checked."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert len(response.content) < 2000
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert isinstance(error["message"], str) and error["message"]
    assert "pydantic" not in error["message"] and "Traceback" not in error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("path", "body", "param"), [row[:1] + row[2:] for row in TABLE], ids=[f"{row[0][4:8]}: {row[1]}" for row in TABLE]
)
def test_mistake_is_refused_and_named(
    client: httpx.Client, server: Server, path: str, body: Body, param: str | None
) -> None:
    response = client.post(path, content=body(server.model), headers=JSON)
    assert response.status_code == 400, response.text[:300]
    error = _error(response)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_unknown_model(client: httpx.Client) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = {"model": "x" * 200, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        response = client.post(path, json=body)
        assert response.status_code == 404
        assert (_error(response)["param"], _error(response)["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"])
def test_wrong_content_type(client: httpx.Client, kind: str) -> None:
    response = client.post("/v1/completions", content=b"{}", headers={"content-type": kind})
    assert response.status_code == 415
    assert "application/json" in _error(response)["message"]


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "GET"])
def test_wrong_method(client: httpx.Client, method: str) -> None:
    response = client.request(method, "/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    _error(response)


def test_null_everywhere_is_as_good_as_nothing(client: httpx.Client, server: Server) -> None:
    document = client.get("/openapi.json").json()
    for path, schema in (("/v1/completions", "CompletionBody"), ("/v1/chat/completions", "ChatBody")):
        names = document["components"]["schemas"][schema]["properties"]
        given = {"model": server.model, "max_tokens": 1}
        given["prompt" if "prompt" in names else "messages"] = (
            "hi" if "prompt" in names else [{"role": "user", "content": "hi", "name": None, "tool_calls": None}]
        )
        response = client.post(path, json=dict.fromkeys(names) | {"tools": None, "nonsense": None} | given)
        assert response.status_code == 200, response.text


WORDS = [
    "model",
    "messages",
    "prompt",
    "role",
    "content",
    "user",
    "assistant",
    "type",
    "text",
    "\x00",
    "\U0001f600",
    "",
]
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**25), 10**25),
    st.sampled_from([0, 1, -1, 2**31, 2**63, -(2**63), 49151, 49152]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(WORDS),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)
PLAUSIBLE = [None, 1, 0.5, True, "x", ["x"], [5], {"5": 1}, {}, []]
FIELDS = (  # noqa: SIM905
    "model messages prompt max_tokens max_completion_tokens min_tokens temperature top_p top_k min_p n seed "
    "presence_penalty frequency_penalty repetition_penalty stop stop_token_ids include_stop_str_in_output ignore_eos "
    "logit_bias bad_words stream stream_options return_token_ids user priority cache_salt request_id logprobs "
    "top_logprobs echo tools response_format"
).split()


def _small(body: dict[str, Any]) -> dict[str, Any]:
    """The body, asking for two tokens at most."""
    for name in ("max_tokens", "max_completion_tokens", "n"):
        if type(body.get(name)) is int and body[name] > 2:
            body[name] = 2
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = 2
    return body


@st.composite
def mutated_bodies(draw: st.DrawFn) -> tuple[bool, dict[str, Any], bytes]:
    """(whether it is a chat, the fields to exchange, what to put in place of the bytes: a valid body in most cases)."""
    damage = draw(st.sampled_from([b""] * 16 + [b"\xff", b"\x00", b'"', b"}", b"[", b"\\", b"9", b"cut"]))
    values = VALUES if draw(st.booleans()) else st.sampled_from(PLAUSIBLE)
    changes = draw(st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=2))
    return draw(st.booleans()), changes, damage


def test_mutated_bodies(client: httpx.Client, server: Server) -> None:
    """Valid bodies with fields exchanged, bytes changed or the end cut off: an answer, or an error that says why."""
    statuses: list[int] = []

    @settings(
        max_examples=250,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(mutation=mutated_bodies(), place=st.integers(0, 90))
    def check(mutation: tuple[bool, dict[str, Any], bytes], place: int) -> None:
        chat, changes, damage = mutation
        question: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
        body = json.dumps(_small({"model": server.model, "max_tokens": 2} | question | changes)).encode()
        if damage:
            body = body[:place] + (b"" if damage == b"cut" else damage + body[place + 1 :])
        response = client.post("/v1/chat/completions" if chat else "/v1/completions", content=body, headers=JSON)
        statuses.append(response.status_code)
        _check_answer(response)

    check()
    assert statuses.count(200) > 5
    assert statuses.count(400) > 50


def _check_answer(response: httpx.Response) -> None:
    if response.status_code != 200:
        assert response.status_code in (400, 404), (response.status_code, response.text[:300])
        _error(response)
    elif response.headers["content-type"] == "application/json":
        assert response.json()["choices"]
    else:
        events = list(sse_events(iter(response.text.splitlines())))
        assert events[-1] == {"done": True}
        assert not any("error" in event for event in events)
