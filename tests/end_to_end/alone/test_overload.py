"""More than the server can take: it says so at once, keeps what it accepted, and goes on answering probes."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.end_to_end.conftest import Server, run_server
from tests.end_to_end.raw_http import Exchange, exchange, run_all, waited_for_a_core

pytestmark = pytest.mark.model

QUEUE_LIMIT = 32
BURST = 200
MAX_REFUSAL_SECONDS = 0.1
MAX_PROBE_SECONDS = 0.25
HUGE = 27 * 1024 * 1024


@pytest.fixture(scope="module")
def small_queue() -> Iterator[Server]:
    """A server with places for 32 requests, running and waiting, that computes few tokens in a step."""
    places = ("--max-num-seqs", "8", "--max-queued-requests", str(QUEUE_LIMIT - 8))
    steps = ("--max-num-batched-tokens", "64", "--prefill-share", "0.5", "--max-model-len", "2304")
    with run_server(*places, *steps) as running:
        yield running


def burst(server: Server, stream: bool) -> list[Exchange]:
    body = {"model": server.model, "max_tokens": 4, "ignore_eos": True, "stream": stream}
    return [
        exchange("/v1/chat/completions", messages=[{"role": "user", "content": f"{index}?"}], **body)
        for index in range(BURST)
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_x02_excess_of_a_burst_is_refused_at_once(small_queue: Server, stream: bool) -> None:
    run_all(small_queue.url, burst(small_queue, stream)[:8], 60)
    exchanges = burst(small_queue, stream)
    api = small_queue.children()["api"].pid
    waited = waited_for_a_core(api)
    run_all(small_queue.url, exchanges, 100)
    waited = waited_for_a_core(api) - waited
    accepted = [entry for entry in exchanges if entry.status == 200]
    refused = [entry for entry in exchanges if entry.status == 429]
    assert len(accepted) + len(refused) == BURST
    assert len(accepted) >= QUEUE_LIMIT
    assert len(refused) >= BURST // 2
    for entry in accepted:
        assert b'"finish_reason":"length"' in entry.data
        assert entry.data.endswith(b"0\r\n\r\n" if stream else b"}")
    for entry in refused:
        assert int(entry.headers["retry-after"]) >= 1
        assert json.loads(entry.data.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "rate_limit_error"
    slowest = max(entry.seconds for entry in refused)
    assert slowest < MAX_REFUSAL_SECONDS + waited, f"{slowest:.3f} s, of which {waited:.3f} s without a core"
    small_queue.wait_for(small_queue.is_idle, 5, "idleness")


def test_what_no_queue_would_hold_is_a_bad_request(small_queue: Server) -> None:
    body = {"model": small_queue.model, "prompt": "Once", "max_tokens": 1}
    refused = small_queue.http.post("/v1/completions", json={**body, "n": QUEUE_LIMIT + 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert str(QUEUE_LIMIT) in refused.json()["error"]["message"]
    assert len(small_queue.post("/v1/completions", **body, n=QUEUE_LIMIT)["choices"]) == QUEUE_LIMIT


def test_x15_a_heavy_request_does_not_block_light_ones(small_queue: Server) -> None:
    heavy_took: list[float] = []

    def heavy() -> None:
        small_queue.post("/v1/completions", prompt=[3000 + position * 11 for position in range(2000)], max_tokens=1)
        heavy_took.append(time.monotonic() - start)

    def light(index: int) -> float:
        small_queue.post("/v1/completions", prompt=f"{index} and", max_tokens=2, ignore_eos=True)
        return time.monotonic() - start

    start = time.monotonic()
    thread = threading.Thread(target=heavy)
    thread.start()
    small_queue.wait_for(lambda: small_queue.progress()["running"] == 1, 20, "start of the heavy request")
    with ThreadPoolExecutor(20) as pool:
        light_took = sorted(pool.map(light, range(20)))
    thread.join(60)
    assert not thread.is_alive()
    assert light_took[18] < 0.8 * heavy_took[0], f"light {light_took[18]:.2f} s, heavy {heavy_took[0]:.2f} s"


def _text() -> bytes:
    return b'{"model":"m","prompt":"' + b"a " * (HUGE // 2) + b'"}'


def _ids() -> bytes:
    return b'{"model":"m","prompt":[' + b"1," * (HUGE // 2) + b"1]}"


def _messages() -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"' + b"word " * (HUGE // 5) + b'"}]}'


def _nested() -> bytes:
    return b'{"model":"m","prompt":' + b"[" * (HUGE // 2) + b"]" * (HUGE // 2) + b"}"


@pytest.mark.parametrize(
    ("make", "path", "param"),
    [
        (_text, "/v1/completions", "prompt"),
        (_ids, "/v1/completions", "prompt"),
        (_messages, "/v1/chat/completions", "messages"),
        (_nested, "/v1/completions", None),
    ],
    ids=["text", "ids", "messages", "nested"],
)
def test_huge_body_delays_nobody(server: Server, make: Callable[[], bytes], path: str, param: str | None) -> None:
    body = make()
    assert len(body) > HUGE
    answers: list[httpx.Response] = []

    def send() -> None:
        headers = {"content-type": "application/json"}
        answers.append(httpx.post(server.url + path, content=body, headers=headers, timeout=60))

    sender = threading.Thread(target=send)
    api = server.children()["api"].pid
    server.http.get("/health/live").raise_for_status()
    sender.start()
    probes = []
    while sender.is_alive():
        waited, start = waited_for_a_core(api), time.monotonic()
        server.http.get("/health/live").raise_for_status()
        probes.append(time.monotonic() - start - (waited_for_a_core(api) - waited))
    sender.join()
    assert len(probes) > 1
    assert max(probes) < MAX_PROBE_SECONDS
    (answer,) = answers
    assert answer.status_code == 400
    assert len(answer.content) < 1000
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or (error["param"], error["code"]) == (param, "context_length_exceeded")
