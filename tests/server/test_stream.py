"""Server-sent events of both generation routes."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.errors import InternalError, Unavailable
from server.wire import Event
from tests.server.exchange import call, chat, complete, finishes_of, run, texts_of
from tests.server.fakes import EOS, TOKENIZER, FakeEngine, Script, ids_of, make_app, says

UNICODE = "访问搜索预报👩‍👩‍👧‍👦ďábelské🇨🇿"


def raises(error: Exception, after: str = "") -> Script:
    """Some text, then a failure."""

    def script(request: object, choice: int) -> list[Event | Exception]:
        return [*(Event(0, [token_id]) for token_id in ids_of(after)), error]

    return script


def ends(reason: str, after: str = "") -> Script:
    """Some text, then an end that is no finish reason of the API."""

    def script(request: object, choice: int) -> list[Event | Exception]:
        return [*(Event(0, [token_id]) for token_id in ids_of(after)), Event(0, finish_reason=reason, message="why")]

    return script


def refuses(kind: str) -> Script:
    """What the engine says of a sequence that the scheduler did not take."""

    def script(request: object, choice: int) -> list[Event | Exception]:
        return [Event(0, refusal=kind, message="why")]

    return script


def test_chunks() -> None:
    answer = chat(make_app(FakeEngine(script=says("hi"))), stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    events = answer.events
    assert len({json.dumps([event[name] for name in ("id", "object", "created", "model")]) for event in events}) == 1
    assert events[0]["id"] == "chatcmpl-" + answer.headers["x-request-id"]
    assert events[0]["object"] == "chat.completion.chunk"
    assert [event["choices"][0] for event in events] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "h"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "i"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None},
    ]
    assert all("usage" not in event for event in events)


def test_completion_chunks() -> None:
    events = complete(make_app(FakeEngine(script=says("hi", reason="length"))), stream=True).events
    assert [event["choices"][0] for event in events] == [
        {"index": 0, "text": "h", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "i", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None},
    ]
    assert {event["object"] for event in events} == {"text_completion"}


@pytest.mark.parametrize("per_event", [1, 2, 5])
def test_each_choice_finishes_once(per_event: int) -> None:
    """H02, H03."""
    engine = FakeEngine(script=says("hello one", "he", "three!", per_event=per_event))
    options = {"n": 3, "max_tokens": 5}
    whole = chat(make_app(engine), **options).json["choices"]
    events = chat(make_app(engine), stream=True, **options).events
    assert finishes_of(events) == {0: ["length"], 1: ["stop"], 2: ["length"]}
    assert texts_of(events) == {choice["index"]: choice["message"]["content"] for choice in whole}
    roles = [event["choices"][0]["index"] for event in events if "role" in event["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1, 2]
    last = {}
    for event in events:
        choice = event["choices"][0]
        last[choice["index"]] = choice["finish_reason"]
    assert None not in last.values()


def test_usage_only_when_asked_for() -> None:
    """X18."""
    app = make_app(FakeEngine(script=says("hi", cached=16)))
    for asked in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        assert all(event["choices"] for event in chat(app, stream=True, **asked).events)
    events = chat(app, stream=True, n=2, stream_options={"include_usage": True}).events
    assert [event["choices"] == [] for event in events] == [False] * (len(events) - 1) + [True]
    assert all(event["usage"] is None for event in events[:-1])
    whole = chat(app, n=2).json["usage"]
    assert events[-1]["usage"] == whole
    assert whole["prompt_tokens_details"] == {"cached_tokens": 16}


@pytest.mark.parametrize("send", [chat, complete])
def test_usage_so_far_in_every_chunk(send: Callable[..., Any]) -> None:
    app = make_app(FakeEngine(script=says("hey", cached=16)))
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = send(app, stream=True, stream_options=options).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 3 and {1, 2, 3} <= set(counts)
    assert events[-1]["choices"] == [] and events[-2]["usage"] == events[-1]["usage"]
    without = send(app, stream=True, stream_options={"continuous_usage_stats": True}).events
    assert all("usage" not in event for event in without)


def test_prefill_makes_no_chunks() -> None:
    def script(request: object, choice: int) -> list[Event | Exception]:
        return [Event(0), Event(0), Event(0, ids_of("a")), Event(0, finish_reason="length")]

    events = chat(make_app(FakeEngine(script=script)), stream=True).events
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {},
    ]


@pytest.mark.parametrize("per_event", [1, 3, 50])
@pytest.mark.parametrize("n", [1, 2])
def test_unicode_is_never_cut(per_event: int, n: int) -> None:
    """H06, H07."""
    app = make_app(FakeEngine(script=says(UNICODE, per_event=per_event)))
    events = chat(app, stream=True, n=n).events
    assert texts_of(events) == dict.fromkeys(range(n), UNICODE)
    assert "\ufffd" not in json.dumps(events, ensure_ascii=False)


@pytest.mark.parametrize("length", range(1, 16))
def test_truncation_within_a_character_shows_no_half_of_it(length: int) -> None:
    app = make_app(FakeEngine(script=says(UNICODE)))
    whole = chat(app, max_tokens=length).json["choices"][0]["message"]["content"]
    assert texts_of(chat(app, max_tokens=length, stream=True).events) == {0: whole}
    assert UNICODE.startswith(whole)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    text=st.text(alphabet="abé👩", max_size=12),
    stop=st.lists(st.text(alphabet="abé👩", min_size=1, max_size=4), min_size=1, max_size=4),
    per_event=st.integers(1, 4),
    include=st.booleans(),
)
def test_stop_strings_are_the_same_streamed_or_not(text: str, stop: list[str], per_event: int, include: bool) -> None:
    """H10, and no chunk ever shows what is later taken back."""
    app = make_app(FakeEngine(script=says(text, per_event=per_event)), access_log=False)
    options = {"stop": stop, "include_stop_str_in_output": include, "logprobs": True, "return_token_ids": True}
    choice = chat(app, **options).json["choices"][0]
    events = chat(app, stream=True, **options).events
    assert texts_of(events) == {0: choice["message"]["content"]}
    ends_at = [text.find(one) + len(one) for one in stop if one in text]
    if ends_at:
        assert choice["stop_reason"] in stop
        shown = text[: min(ends_at)]
        assert choice["message"]["content"] == (shown if include else shown.removesuffix(choice["stop_reason"]))
    else:
        assert (choice["message"]["content"], choice["stop_reason"]) == (text, None)
    chunks = [event["choices"][0] for event in events]
    streamed = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert streamed == choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in streamed) == choice["message"]["content"].encode()
    assert [token_id for chunk in chunks for token_id in chunk.get("token_ids", [])] == choice["token_ids"]


def test_completion_tokens_end_with_the_stop_string() -> None:
    engine = FakeEngine(script=says("abcdefgh", per_event=8))
    events = complete(make_app(engine), stop="cd", stream=True, stream_options={"include_usage": True}).events
    assert events[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (raises(InternalError("The engine failed."), "ab"), "The engine failed."),
        (raises(Unavailable("engine gone"), "ab"), "engine gone"),
        (ends("timeout", "ab"), "why"),
        (ends("error", "ab"), "why"),
        (ends("abort", "ab"), "why"),
        (raises(RuntimeError("a secret"), "ab"), "The server had an error."),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_failure_in_mid_stream(script: Script, message: str, n: int, caplog: pytest.LogCaptureFixture) -> None:
    """H01: an error event and [DONE], and no finish reason that did not happen."""
    with caplog.at_level(logging.CRITICAL):
        answer = chat(make_app(FakeEngine(script=script)), stream=True, n=n)
    assert answer.status == 200
    *before, last = answer.events
    assert last["error"]["message"] == message
    assert last["error"]["type"] in ("server_error", "timeout_error")
    assert finishes_of(before) == {}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "status"),
    [
        (refuses("QueueFull"), 429),
        (refuses("NeverFits"), 400),
        (raises(Unavailable("gone")), 503),
        (ends("timeout"), 408),
        (ends("error"), 500),
        (ends("abort"), 503),
        (raises(RuntimeError("a secret")), 500),
    ],
)
def test_failure_before_the_first_token_has_its_status(
    script: Script, status: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL):
        answer = chat(make_app(FakeEngine(script=script)), stream=stream)
    assert answer.status == status
    assert "secret" not in answer.error["message"]
    assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_failure_of_a_plain_answer_is_an_error_even_after_some_tokens() -> None:
    assert chat(make_app(FakeEngine(script=ends("timeout", "ab")))).status == 408


def test_bad_requests_are_refused_before_the_stream() -> None:
    """H04."""
    answer = chat(make_app(FakeEngine()), stream=True, messages=[{"role": "user", "content": "x" * 600}])
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


def test_special_tokens_in_the_output_are_not_text_and_do_not_cut_characters() -> None:
    first, *rest = ids_of("€")

    def script(request: object, choice: int) -> list[Event | Exception]:
        return [Event(0, [*ids_of("a"), 1, first, 1, *rest, EOS], finish_reason="length")]

    app = make_app(FakeEngine(script=script))
    assert texts_of(chat(app, stream=True, ignore_eos=True).events) == {0: "a€"}
    assert TOKENIZER.is_special(1)


def test_neighbours_stream_the_same_text() -> None:
    """H07: eight at once, each equal to itself alone."""
    app = make_app(FakeEngine(script=says(UNICODE, per_event=2)))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}

    async def all_at_once() -> list[dict[int, str]]:
        answers = await asyncio.gather(*(call(app, "POST", "/v1/chat/completions", body) for _ in range(8)))
        return [texts_of(answer.events) for answer in answers]

    assert run(all_at_once()) == [{0: UNICODE}] * 8
