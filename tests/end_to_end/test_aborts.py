"""Clients that go away, in the queue, in prefill and in decode: everything that they held is free at once."""

import socket
import time

import pytest

from tests.end_to_end.conftest import Server
from tests.end_to_end.raw_http import Exchange, exchange, run_all

pytestmark = pytest.mark.model

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WAVES = 5
WAVE = 100
SECONDS_UNTIL_FREE = 15.0
LONG = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. "


def dropped(server: Server, index: int) -> Exchange:
    """Every kind of request that can be dropped, in turn, with one choice or two: streams after 1 to 3 chunks; then, in
    prefill or in the queue, streams with long and short prompts, and an answer without a stream."""
    kind = index % 8
    prompt = f"{index} " + LONG * (20 if kind == 4 else 0)
    body = {"model": server.model, "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "n": 1 + index // 8 % 2}
    return exchange(COMPLETIONS, kind if kind < 4 else 0, stream=kind != 5, **body)


def test_h37_five_hundred_dropped_streams_leave_nothing(server: Server) -> None:
    server.wait_for(server.is_idle, 10, "idleness")
    before = server.metrics()
    for wave in range(WAVES):
        exchanges = [dropped(server, wave * WAVE + index) for index in range(WAVE)]
        run_all(server.url, exchanges, 60)
        assert {entry.status for entry in exchanges} <= {0, 200}
        assert sum(entry.events >= 3 for entry in exchanges) > WAVE // 10
    server.wait_for(server.is_idle, SECONDS_UNTIL_FREE, "release of what the dropped streams held")
    after = server.metrics()
    assert after["num_requests_running"] == after["num_requests_waiting"] == after["kv_cache_usage_perc"] == 0
    assert after["request_success_total:stop"] == before["request_success_total:stop"]
    assert after["request_success_total:error"] == before["request_success_total:error"]
    answer = server.post(CHAT, messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0)
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."


def test_x04_gauges_fall_without_another_request(server: Server) -> None:
    body = {"model": server.model, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    streams = [server.http.stream("POST", COMPLETIONS, json=body) for _ in range(12)]
    responses = [stream.__enter__() for stream in streams]
    for response in responses:
        assert response.status_code == 200
    server.wait_for(lambda: server.metrics()["num_requests_running"] == 12, 20, "a full batch")
    assert server.metrics()["kv_cache_usage_perc"] > 0
    for stream in streams:
        stream.__exit__(None, None, None)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    server.wait_for(
        lambda: not any(server.metrics()[name] for name in names), SECONDS_UNTIL_FREE, "the fall of the gauges"
    )


@pytest.mark.parametrize("n", [1, 2])
def test_x05_each_abort_is_counted_once(server: Server, n: int) -> None:
    server.wait_for(server.is_idle, 10, "idleness")
    before = server.metrics()
    body = {"model": server.model, "prompt": "Once", "ignore_eos": True, "stream": True, "n": n}
    run_all(server.url, [exchange(COMPLETIONS, 1 + index % 2, max_tokens=2000, **body) for index in range(10)], 60)
    run_all(server.url, [exchange(COMPLETIONS, None, max_tokens=3, **body) for _ in range(4)], 60)
    server.wait_for(server.is_idle, SECONDS_UNTIL_FREE, "idleness")

    def ended(reason: str) -> float:
        return server.metrics()[f"request_success_total:{reason}"] - before[f"request_success_total:{reason}"]

    assert {reason: ended(reason) for reason in ("abort", "length", "stop", "error", "timeout")} == {
        "abort": 10 * n,
        "length": 4 * n,
        "stop": 0,
        "error": 0,
        "timeout": 0,
    }
    count = server.metrics()["e2e_request_latency_seconds_count"] - before["e2e_request_latency_seconds_count"]
    assert count == 14 * n


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pipelined", [1, 16])
def test_leaving_with_requests_in_the_pipe(server: Server, stream: bool, pipelined: int) -> None:
    """The connection's newest request is not the one that is being answered."""
    server.wait_for(server.is_idle, 10, "idleness")
    body = {"model": server.model, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    wire = exchange(COMPLETIONS, None, **body).wire().replace(b"connection: close\r\n", b"")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(wire)
        server.wait_for(lambda: server.progress()["running"] == 1, 10, "the first request's start")
        connection.sendall(wire * pipelined)
        time.sleep(0.1)
    server.wait_for(server.is_idle, SECONDS_UNTIL_FREE, "release of what the connection's requests held")


def test_stop_string_frees_the_sequence(server: Server) -> None:
    body = {"prompt": "The numbers are 1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 2000, "stop": [" 9"]}
    (choice,) = server.post(COMPLETIONS, ignore_eos=True, **body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" 7, 8,", "stop", " 9")
    server.wait_for(server.is_idle, SECONDS_UNTIL_FREE, "idleness")
