"""Processes that die, hang or are told to stop: what clients see, and what is left behind."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from server.cli import main
from tests.end_to_end.conftest import Server, run_server, sse_events
from tests.end_to_end.test_conversation import QUESTION, finishes, texts

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

LONG = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}


OPTIONS = ("--stall-timeout", "2", "--max-model-len", "4096")


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that the test may kill. What it writes is not for `capfd`, which sees the test's own children."""
    with run_server(*OPTIONS) as running:
        yield running


def _socket_folder(server: Server) -> Path:
    bound = [Path(entry.laddr) for entry in server.children()["api"].net_connections("unix") if entry.laddr]
    return next(path.parent for path in bound if path.parent.name.startswith("firstlight-"))


def _wait_gone(processes: list[psutil.Process], seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert alive == []


def _read_stream(server: Server, events: list[dict[str, object]], started: threading.Event) -> None:
    body = {"model": server.model, **LONG}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        for event in sse_events(response.iter_lines()):
            events.append(event)
            started.set()


def test_streams_go_on_when_the_engine_is_lost(own_server: Server) -> None:
    """Killed, or stopped until it is killed for its silence; who comes meanwhile waits too."""
    body = LONG | {"max_tokens": 100, "seed": 3}
    undisturbed = own_server.stream("/v1/completions", **body)
    assert finishes(undisturbed) == {0: ["length"]}
    for fault in (signal.SIGKILL, signal.SIGSTOP):
        disturbed = _stream_past(fault, own_server, body)
        assert texts(disturbed, "text") == texts(undisturbed, "text")
        assert finishes(disturbed) == {0: ["length"]}


def _has_said(server: Server, tokens: float) -> bool:
    return server.metrics()["generation_tokens_total"] > tokens


def _stream_past(fault: signal.Signals, server: Server, body: dict[str, object]) -> list[dict[str, Any]]:
    """A stream in whose midst the engine is lost."""
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            told = server.metrics()["generation_tokens_total"]
            stream = pool.submit(server.stream, "/v1/completions", **body)
            server.wait_for(partial(_has_said, server, told + 30), 60, "output")
            if stopped := server.stop_at_work("engine"):
                break
            stream.result(60)
        first_engine = stopped["engine"]
        first_engine.send_signal(fault)
        server.wait_for(lambda: not server.is_ready(), 20, "unreadiness")
        late = pool.submit(
            server.post, "/v1/completions", prompt="The capital of France is", max_tokens=3, temperature=0
        )
        assert "Paris" in late.result(60)["choices"][0]["text"]
        assert server.children()["engine"].pid != first_engine.pid
        return stream.result(60)


def test_sigkill_of_the_api_process_leaves_nothing(own_server: Server) -> None:
    children = own_server.children()
    everybody = [psutil.Process(own_server.process.pid), *children.values()]
    folder = _socket_folder(own_server)
    children["api"].kill()
    assert own_server.process.wait(30) != 0
    _wait_gone(everybody, 30)
    assert not folder.exists()


def test_an_api_process_that_gives_no_sign_of_life_ends_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    with run_server("--stall-timeout", "1") as server:
        everybody = [psutil.Process(server.process.pid), *server.children().values()]
        server.children()["api"].suspend()
        began = time.monotonic()
        assert server.process.wait(30) == 1
        assert time.monotonic() - began > 3
        _wait_gone(everybody, 30)
    assert "the API process gave no sign of life for 4 s and is killed; stopping" in capfd.readouterr().err


def test_sigkill_of_the_supervisor_leaves_nothing(own_server: Server) -> None:
    """Not even of children that are stopped, and cannot read that their pipe has ended."""
    own_server.children()["engine"].kill()
    form = {"type": "json_object"}
    own_server.post("/v1/chat/completions", messages=QUESTION, response_format=form, max_tokens=2)
    own_server.wait_for(lambda: "spare engine" in own_server.children(), 60, "a spare engine")
    children, folder = list(own_server.children().values()), _socket_folder(own_server)
    for name in ("api", "engine", "spare engine", "grammars"):
        own_server.children()[name].suspend()
    own_server.process.kill()
    own_server.process.wait(30)
    _wait_gone(children, 30)
    assert not folder.exists()


def _start_in_vain() -> None:
    """A start that ends as soon as the engine has seen that it has no memory."""
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", "--memory-budget", "1MiB"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 2


def test_sigkill_of_everybody_at_once_leaves_what_the_next_start_removes(own_server: Server) -> None:
    """It knows which servers live: not that one, before it was killed."""
    folder, everybody = _socket_folder(own_server), list(own_server.children().values())
    _start_in_vain()
    assert folder.exists() and own_server.is_ready()
    own_server.process.send_signal(signal.SIGSTOP)  # nobody is to clean up
    for child in everybody:
        child.kill()
    own_server.process.kill()
    own_server.process.wait(5)
    assert folder.exists()
    _start_in_vain()
    assert not folder.exists()


LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [a-z_.]+: ")


def test_sigterm_drains(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever was accepted is finished, also by another engine. The one that has it is stopped, lest all is over
    before this program has looked. Every line of the log, of whichever process, has its time."""
    with run_server(*OPTIONS) as own_server:
        body = {"model": own_server.model, "prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
        children = own_server.children()
        with own_server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            events = sse_events(response.iter_lines())
            next(events)
            for process in (*children.values(), own_server.process):  # as service managers do
                process.send_signal(signal.SIGTERM)
            children["engine"].suspend()
            own_server.wait_for(lambda: not own_server.is_ready(), 20, "unreadiness")
            refused = client.post("/v1/completions", json=body)
            assert refused.status_code == 503
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have been silent for too long
                children["engine"].kill()
            rest = list(events)
        assert rest[-1] == {"done": True}
        finishes = [choice["finish_reason"] for event in rest[:-1] for choice in event["choices"]]  # type: ignore[attr-defined]
        assert finishes[-1] == "length"
        assert own_server.process.wait(30) == 0
        log = capfd.readouterr().err.splitlines()
        assert any("server.supervisor: draining" in line for line in log)
        assert [line for line in log if LOG_LINE.match(line) is None] == []


def test_the_time_to_drain_is_limited() -> None:
    events: list[dict[str, object]] = []
    started = threading.Event()
    with run_server("--shutdown-timeout", "1") as server:
        reader = threading.Thread(target=_read_stream, args=(server, events, started))
        reader.start()
        assert started.wait(30)
        server.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert server.process.wait(30) == 0
        assert 1 <= time.monotonic() - begin < 20, "not the 30 s that streams have otherwise"
        reader.join(30)
    assert set(events[-2]) == {"error"}
    assert events[-1] == {"done": True}


def test_second_sigterm_hastens(capfd: pytest.CaptureFixture[str]) -> None:
    """Streams end with an error, and who has not sent all of a request is answered too."""
    with run_server(*OPTIONS) as own_server:
        half = socket.create_connection(("127.0.0.1", own_server.http.base_url.port or 0))
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        half.sendall(head + b"{")
        events: list[dict[str, object]] = []
        started = threading.Event()
        reader = threading.Thread(target=_read_stream, args=(own_server, events, started))
        reader.start()
        assert started.wait(30)
        own_server.process.send_signal(signal.SIGTERM)
        own_server.wait_for(lambda: not own_server.is_ready(), 20, "unreadiness")
        begin = time.monotonic()
        own_server.process.send_signal(signal.SIGTERM)
        assert own_server.process.wait(30) == 130
        assert time.monotonic() - begin < 20, "not the 30 s that streams have after the first one"
        assert half.recv(100).startswith(b"HTTP/1.1 503 ")
        half.close()
        assert "Traceback" not in capfd.readouterr().err
        reader.join(30)
        assert not reader.is_alive()
        assert set(events[-2]) == {"error"}
        assert events[-1] == {"done": True}


def test_an_engine_that_cannot_come_back_ends_the_server(own_server: Server) -> None:
    """Somebody cleaned up, and the folder with the socket is gone: nothing that starts now could connect."""
    everybody = [psutil.Process(own_server.process.pid), *own_server.children().values()]
    shutil.rmtree(_socket_folder(own_server))
    assert own_server.is_ready()
    own_server.children()["engine"].kill()
    assert own_server.process.wait(30) == 1
    _wait_gone(everybody, 30)


def test_port_in_use_is_said_plainly() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "server.cli", "serve", "--port", port]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    reason = f"firstlight: cannot listen on 127.0.0.1 port {port}"
    assert [line.startswith(reason) for line in result.stderr.splitlines()] == [True], "one line, and nothing else"


def test_a_path_too_long_for_sockets_is_said_plainly(tmp_path: Path) -> None:
    place = tmp_path / ("x" * 100)
    place.mkdir()
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0"]
    environment = os.environ | {"TMPDIR": str(place)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 2
    assert f"{place} is too long a path" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/at/all"], "neither a folder"),
        (["/nowhere/at/all", "--served-model-name", "mine"], "neither a folder"),
        (["--max-num-seqs", "0"], "max_num_seqs must be positive"),
        (["--max-num-seqs", "many"], "--max-num-seqs"),
    ],
)
def test_bad_configuration_is_said_plainly(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_what_the_engine_refuses_is_said_plainly() -> None:
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", "--memory-budget", "1MiB"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "memory_budget" in result.stderr
    assert "Traceback" not in result.stderr
