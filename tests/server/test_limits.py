"""Each bound of the gateway, one above it, and that a refusal comes early and blocks nobody."""

import asyncio
import json
import time
from collections.abc import Callable

import pytest

from server.errors import BadRequest, Unavailable
from tests.server.exchange import Exchange, call, chat, run
from tests.server.fakes import MAX_MODEL_LEN, TOKENIZER, FakeEngine, make_app

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BIG = 27 * 1024 * 1024


def padded(size: int) -> bytes:
    """A valid body of exactly this many bytes."""
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}'
    return body + b" " * (size - len(body))


def test_body_limit_by_declared_length() -> None:
    app = make_app(FakeEngine(), max_body_bytes=1000)

    async def send(size: int) -> int:
        exchange = Exchange(app, "POST", CHAT)
        exchange.header("content-type", "application/json")
        exchange.header("content-length", str(size))
        exchange.give(padded(size) if size <= 1000 else b"", more=size > 1000)
        return (await exchange.run()).status

    assert run(send(1000)) == 200
    assert run(send(1001)) == 413


def test_body_limit_without_declared_length() -> None:
    app = make_app(FakeEngine(), max_body_bytes=1000)
    assert run(call(app, "POST", CHAT, padded(1000))).status == 200
    answer = run(call(app, "POST", CHAT, padded(1001)))
    assert (answer.status, answer.error["type"]) == (413, "invalid_request_error")


def test_body_limit_ends_reading() -> None:
    engine = FakeEngine()
    app = make_app(engine, max_body_bytes=1000)

    async def endless() -> int:
        exchange = Exchange(app, "POST", CHAT)
        exchange.header("content-type", "application/json")
        for _ in range(20):
            exchange.give(b"x" * 100, more=True)
        status = (await exchange.run()).status
        assert exchange.inbox.qsize() == 9
        return status

    assert run(endless()) == 413
    assert engine.reserved == 0


def test_body_timeout() -> None:
    engine = FakeEngine()
    app = make_app(engine, body_timeout=0.05)

    async def slow() -> int:
        exchange = Exchange(app, "POST", CHAT)
        exchange.header("content-type", "application/json")
        exchange.give(b"{", more=True)
        return (await exchange.run()).status

    assert run(slow()) == 408
    assert engine.reserved == 0


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_full_queue_answers_before_the_body_is_read(path: str) -> None:
    app = make_app(FakeEngine(places=0))

    async def without_body() -> float:
        exchange = Exchange(app, "POST", path)
        begun = time.perf_counter()
        answer = await exchange.run()
        assert answer.status == 429
        assert answer.error["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        return time.perf_counter() - begun

    assert min(run(without_body()) for _ in range(5)) < 0.1


def test_a_full_queue_at_submit() -> None:
    engine = FakeEngine(places=2)
    answer = chat(make_app(engine), n=3)
    assert (answer.status, engine.reserved, engine.live) == (429, 0, 0)


def test_burst_takes_as_many_as_there_are_places() -> None:
    engine = FakeEngine(places=8, delay=0.001)
    app = make_app(engine, access_log=False)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}

    async def burst() -> list[int]:
        answers = await asyncio.gather(*(call(app, "POST", CHAT, body) for _ in range(50)))
        return [answer.status for answer in answers]

    statuses = run(burst())
    assert statuses.count(200) + statuses.count(429) == 50
    assert 8 <= statuses.count(200) < 50
    assert (engine.live, engine.reserved) == (0, 0)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
def test_unavailable(path: str) -> None:
    answer = run(call(make_app(FakeEngine(unready=Unavailable("the model is loading"))), "POST", path, {"prompt": "x"}))
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1


BIG_BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "prompt": (COMPLETIONS, lambda: b'{"model": "tiny", "prompt": "' + b"x " * (BIG // 2) + b'"}'),
    "escaped": (COMPLETIONS, lambda: b'{"model": "tiny", "prompt": "' + b"\\u0041" * (BIG // 6) + b'"}'),
    "ids": (COMPLETIONS, lambda: b'{"model": "tiny", "prompt": [5' + b",5" * (BIG // 2) + b"]}"),
    "lists": (COMPLETIONS, lambda: b'{"model": "tiny", "prompt": [[5]' + b",[5]" * (BIG // 4) + b"]}"),
    "strings": (COMPLETIONS, lambda: b'{"model": "tiny", "prompt": ["x"' + b',"x"' * (BIG // 4) + b"]}"),
    "content": (CHAT, lambda: b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"x" * BIG + b'"}]}'),
    "messages": (CHAT, lambda: b'{"model": "tiny", "messages": [{}' + b",{}" * (BIG // 3) + b"]}"),
    "names": (
        COMPLETIONS,
        lambda: b'{"model": "tiny"' + b"".join(b',"%07d":1' % i for i in range(BIG // 12)) + b"}",
    ),
    "tokens": ("/detokenize", lambda: b'{"model": "tiny", "tokens": [5' + b",5" * (BIG // 2) + b"]}"),
}
"""Path and body of 27 MB."""


@pytest.mark.parametrize("kind", BIG_BODIES)
def test_a_huge_body_is_refused_without_blocking_others(kind: str) -> None:
    app = make_app(FakeEngine(), access_log=False)
    path, make = BIG_BODIES[kind]
    raw = make()

    async def longest_pause() -> float:
        """In seconds of this process's work, whatever else the machine does."""
        request = asyncio.create_task(call(app, "POST", path, raw))
        longest, last = 0.0, time.process_time()
        while not request.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.process_time() - last), time.process_time()
        answer = await request
        assert answer.status == 400
        assert (answer.error["param"] is None) == (kind == "names")
        return longest

    assert min(run(longest_pause()) for _ in range(2)) < 0.25


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "tiny", "messages": [{}' + b",{}" * 21_000 + b"]}",
        b'{"model": "tiny", "messages": [{"role": "user", "content": [{}' + b",{}" * 20_000 + b"]}]}",
        b'{"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [{}' + b",{}" * 20_000 + b"]}]}",
        b'{"model": "tiny", "messages": [' + b'{"role": "user", "content": ""},' * 2_000 + b'{"role": 1}]}',
    ],
)
def test_a_body_with_many_faults_is_refused_at_the_first(raw: bytes) -> None:
    app = make_app(FakeEngine(), access_log=False)
    spent = []
    for _ in range(3):  # the quickest: a busy sibling core doubles the time that any work takes
        begun = time.process_time()
        answer = run(call(app, "POST", CHAT, raw))
        spent.append(time.process_time() - begun)
        assert (answer.status, len(answer.body) < 300) == (400, True)
    assert min(spent) < 0.1


def test_a_huge_prompt_gets_both_numbers() -> None:
    path, make = BIG_BODIES["prompt"]
    raw = make()
    error = run(call(make_app(FakeEngine()), "POST", path, raw)).error
    assert (error["code"], error["param"], error["n_ctx"]) == ("context_length_exceeded", "prompt", MAX_MODEL_LEN)
    assert error["n_prompt_tokens"] >= BIG // TOKENIZER.max_token_bytes


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"model": "tiny", "stop": ["' + b"x" * 1_100_000 + b'"]}', "stop"),
        (b'{"model": "tiny", "zebra": [' + b"1," * 600_000 + b"1]}", "zebra"),
        (b'{"prompt": "x"' + b" " * 300_000 + b"}", None),
        (b'{"prompt": "' + b"x" * 2_000_000 + b'", "prompt": "x"}', None),
        (b"[" + b"1," * 200_000 + b"1]", None),
        (b'{"prompt": [' + b"1," * 200_000 + b"}", None),
        (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", None),
    ],
)
def test_other_large_bodies_are_refused_by_size(raw: bytes, param: str | None) -> None:
    answer = run(call(make_app(FakeEngine()), "POST", "/v1/completions", raw))
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_large_body_that_fits_is_answered() -> None:
    engine = FakeEngine(max_model_len=400_000)
    raw = json.dumps({"model": "tiny", "prompt": "x" * 300_000, "max_tokens": 20}).encode()
    answer = run(call(make_app(engine), "POST", "/v1/completions", raw))
    assert (answer.status, answer.json["usage"]["prompt_tokens"]) == (200, 300_000)
    ids = json.dumps({"model": "tiny", "prompt": [[5] * 50_000] * 6}).encode()
    answer = run(call(make_app(engine), "POST", "/v1/completions", ids))
    assert (answer.status, answer.json["usage"]["prompt_tokens"]) == (200, 300_000)


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 5, "n": 128}])
def test_log_probabilities_of_prompts_have_a_bound(fields: dict[str, object]) -> None:
    engine = FakeEngine(max_model_len=2048)
    body = {"model": "tiny", "prompt": [[5] * 1400] * (1 if "n" in fields else 128), "max_tokens": 1} | fields
    answer = run(call(make_app(engine), "POST", COMPLETIONS, body))
    assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")
    assert str(2**20) in answer.error["message"]
    assert (engine.streams, engine.reserved) == ([], 0)


def test_the_bound_of_log_probabilities_is_reached() -> None:
    engine = FakeEngine(max_model_len=2**20 + 2)
    app = make_app(engine)
    body = {"model": "tiny", "max_tokens": 1, "prompt_logprobs": 1, "prompt": [5] * 2**19}
    engine.script = lambda request, choice: [BadRequest("reached")]
    assert run(call(app, "POST", COMPLETIONS, body)).error["message"] == "reached"
    body["prompt"] = [5] * (2**19 + 1)
    assert "limit" in run(call(app, "POST", COMPLETIONS, body)).error["message"]
