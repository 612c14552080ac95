"""Faults that no engine must die of, and a gateway that is kept from its work, on one server."""

import json
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.faults import DELAY_SECONDS
from tests.chaos.kills import chaos_server
from tests.end_to_end.conftest import Server
from tests.end_to_end.showing import picture, shows
from tests.end_to_end.test_conversation import CHAT, COMPLETIONS

STALL_SECONDS = 3.0


@pytest.fixture(scope="module")
def faulty(free_port: int) -> Iterator[Server]:
    arguments = ("--fault-hooks", "--health-port", str(free_port), "--stall-timeout", str(STALL_SECONDS))
    with chaos_server(images=True, arguments=arguments) as server:
        yield server


def asks(server: Server, seed: int, salt: str = "") -> Any:
    messages = shows(picture(seed), "What?")
    body = {"model": server.model, "messages": messages, "max_tokens": 40, "seed": seed, "ignore_eos": True}
    return server.http.post(CHAT, json=body | ({"cache_salt": salt} if salt else {}))


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("fault", "message"),
    [("corrupt@logits", "output was not finite"), ("corrupt@features", "an image could not be encoded")],
)
def test_what_is_not_sound_fails_alone(faulty: Server, fault: str, message: str) -> None:
    alone = [text(asks(faulty, seed)) for seed in range(3)]
    with ThreadPoolExecutor(4) as pool:
        spoilt = pool.submit(asks, faulty, 7, f"fault:{fault}")
        assert [text(response) for response in pool.map(lambda seed: asks(faulty, seed), range(3))] == alone
        failed = spoilt.result()
    assert failed.status_code == 500
    assert message in failed.json()["error"]["message"]
    assert faulty.metrics()["engine_restarts_total"] == 0
    faulty.wait_for(faulty.is_idle, 30, "idleness")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has such a score")
def test_the_kernel_would_take_the_engine(faulty: Server) -> None:
    scores = {name: Path(f"/proc/{one.pid}/oom_score_adj").read_text() for name, one in faulty.children().items()}
    assert int(scores["engine"]) - int(scores["api"]) == 500


def test_a_long_step_is_no_stall(faulty: Server) -> None:
    before = time.monotonic()
    assert text(asks(faulty, 2, "fault:delay@execute"))
    assert time.monotonic() - before > DELAY_SECONDS
    assert faulty.metrics()["engine_restarts_total"] == 0


def test_a_pause_within_the_limit_is_forgiven(faulty: Server) -> None:
    """An engine that is stopped, and goes on before it counts as silent."""
    engine = faulty.children()["engine"]
    before = text(asks(faulty, 2))
    with ThreadPoolExecutor(1) as pool:
        engine.suspend()
        waits = pool.submit(asks, faulty, 2)
        time.sleep(STALL_SECONDS / 4)
        assert not waits.done()
        engine.resume()
        assert text(waits.result()) == before
    assert faulty.children()["engine"].pid == engine.pid


def test_probes_do_not_wait_for_a_blocked_loop(faulty: Server, free_port: int) -> None:
    """They say so once it has lasted, and are right again when it is over."""
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{free_port}", timeout=10) as probe,
        ThreadPoolExecutor(1) as pool,
    ):
        faulty.wait_for(lambda: probe.get("/health/ready").status_code == 200, 30, "readiness")
        assert probe.get("/health").json() == probe.get("/health/live").json() == {"status": "ok"}
        assert probe.get("/health/progress").json()["total_blocks"] > 0
        assert probe.get("/v1/models").status_code == 404
        blocked = pool.submit(asks, faulty, 1, "fault:block@api")
        began = time.monotonic()
        faulty.wait_for(lambda: probe.get("/health/ready").status_code == 503, 30, "unreadiness")
        assert time.monotonic() - began > STALL_SECONDS / 2
        assert not blocked.done()
        assert probe.get("/health/ready").json()["reason"].startswith("the API process has given no sign of life")
        assert probe.get("/health/live").status_code == 503
        assert blocked.result().status_code == 200
        faulty.wait_for(lambda: probe.get("/health/ready").status_code == 200, 30, "readiness")
        assert probe.get("/health/live").status_code == 200


def test_an_engine_that_talks_nonsense_is_replaced(faulty: Server) -> None:
    """Once: the client that asked for it leaves."""
    host, port = faulty.url.removeprefix("http://").split(":")
    body = json.dumps({"model": faulty.model, "prompt": "a", "cache_salt": "fault:corrupt@frame"})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    before = text(asks(faulty, 1))
    with socket.create_connection((host, int(port))) as leaves:
        leaves.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        faulty.wait_for(lambda: faulty.metrics()["engine_restarts_total"] == 1, 30, "a restart")
    assert text(asks(faulty, 1)) == before
    metrics = faulty.metrics()
    assert (metrics["engine_restarts_total"], metrics["recovery_quarantines_total"]) == (1, 0)
