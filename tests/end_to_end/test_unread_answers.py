"""Clients that ask and do not read: after a while nothing is kept for them. The sockets are real, the engine is not."""

import contextlib
import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.tiny_vlm import write_tiny_vlm
from tests.end_to_end.conftest import run_server
from tests.end_to_end.local_app import serve_app
from tests.server.fakes import FakeEngine, make_app, says

PATIENCE = 0.4
SEND_BUFFER = 65_536
TOKENS = 10_000
"""With log-probabilities some 600 kB: more than all buffers hold."""


@contextlib.contextmanager
def asked(
    url: str, *, stream: bool = True, keep_alive: bool = True, tokens: int = TOKENS, model: str = "tiny", n: int = 1
) -> Iterator[socket.socket]:
    """A connection with room for little, on which an answer has been asked for."""
    body = {"model": model, "prompt": "hi", "max_tokens": tokens, "logprobs": 5, "stream": stream, "n": n}
    body["ignore_eos"] = True
    data = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect((host, int(port)))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += b"" if keep_alive else b"Connection: close\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        yield connection


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_engine() -> FakeEngine:
    return FakeEngine(script=says("x" * TOKENS, per_event=10), max_model_len=TOKENS * 2)


def read_to_the_end(connection: socket.socket) -> int:
    """Bytes up to the end that the server makes, which must be a reset: an answer without its end looks whole to
    nobody."""
    size = 0
    try:
        while data := connection.recv(65_536):
            size += len(data)
    except ConnectionResetError:
        return size
    raise AssertionError("the answer looks whole")


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "took next to nothing" in record.getMessage()]


def test_a_stream_that_nobody_reads_ends(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    app = make_app(engine)
    with (
        caplog.at_level(logging.INFO),
        serve_app(app, patience=PATIENCE, send_buffer=SEND_BUFFER) as url,
        asked(url, stream=True) as connection,
    ):
        wait_for(lambda: engine.live == 1)
        wait_for(lambda: engine.live == 0)
        assert engine.cancelled == 1
        assert 0 < engine.streams[0].delivered < TOKENS // 10, "it was the reader who was waited for"
        wait_for(lambda: any(" 499 " in record.getMessage() for record in caplog.records))
        assert len(losses(caplog)) == 1
        assert 0 < read_to_the_end(connection) < 400_000
    counted = app.state.gateway.metrics.exposition().decode()
    assert 'request_success_total{finished_reason="abort",model_name="tiny"} 1.0' in counted


@pytest.mark.parametrize(("keep_alive", "tokens"), [(True, TOKENS), (False, TOKENS), (True, 300)])
def test_an_answer_that_nobody_reads_is_dropped(
    keep_alive: bool, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the connection is to close behind it, or this machine's system has taken all of it."""
    engine = make_engine()
    with (
        serve_app(make_app(engine), patience=PATIENCE, send_buffer=SEND_BUFFER) as url,
        asked(url, stream=False, keep_alive=keep_alive, tokens=tokens) as connection,
    ):
        wait_for(lambda: bool(losses(caplog)))
        assert (engine.live, len(losses(caplog))) == (0, 1)
        assert 0 < read_to_the_end(connection) < 400_000


@pytest.mark.parametrize("stream", [True, False])
def test_who_reads_slowly_gets_everything(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    patience = 1.5
    with (
        serve_app(make_app(make_engine()), patience=patience, send_buffer=SEND_BUFFER) as url,
        asked(url, stream=stream, keep_alive=False) as connection,
    ):
        data = bytearray()
        slow_until = time.monotonic() + 2 * patience
        while piece := connection.recv(8192):
            data += piece
            time.sleep(0.1 if time.monotonic() < slow_until else 0)
        assert time.monotonic() > slow_until, "it was never slow"
    assert losses(caplog) == []
    assert data.count(b'"xxxxxxxxxx"') == TOKENS // 10 if stream else b"x" * TOKENS in data


def test_who_waits_for_the_engine_is_no_client_that_does_not_read(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(script=says("ab"), delay=1.5 * PATIENCE)
    with (
        serve_app(make_app(engine), patience=PATIENCE, send_buffer=SEND_BUFFER) as url,
        asked(url, stream=True, keep_alive=False, tokens=9) as connection,
    ):
        data = bytearray()
        while piece := connection.recv(65_536):
            data += piece
    assert b"data: [DONE]" in data
    assert losses(caplog) == []


@pytest.mark.model
def test_the_server_ends_beside_a_client_that_does_not_read(tmp_path: Path) -> None:
    """The events are more than sockets hold, and fewer than a request may leave unread: it waits until the end."""
    write_tiny_vlm(tmp_path)
    with (
        run_server("--shutdown-timeout", "1", model=str(tmp_path)) as server,
        asked(server.url, model=server.model, tokens=1000, n=16),
    ):
        server.wait_for(lambda: server.metrics()["generation_tokens_total"] > 12_000, 60, "more than sockets hold")
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.process.wait(10) == 0
        assert 1 <= time.monotonic() - began < 6
