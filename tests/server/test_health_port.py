"""The health port by itself: what reports mean, and what it bounds."""

import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from server import health_port, wire
from server.health_port import MAX_CONNECTIONS, HealthBoard, HealthServer
from server.options import OptionError
from tests.server.test_client import STATS


@pytest.fixture
def board() -> HealthBoard:
    return HealthBoard(stall_timeout=60.0)


@pytest.fixture
def listening(board: HealthBoard) -> Iterator[HealthServer]:
    server = HealthServer("127.0.0.1", 0, board)
    yield server
    server.shutdown()
    server.server_close()


def test_reports(board: HealthBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    assert board.answer("/health/live") == (200, {"status": "ok"})
    assert board.answer("/health/ready") == (503, {"status": "unready", "reason": "the server is starting"})
    assert board.answer("/health/progress") == (200, {"status": "no engine"})
    board.hear(wire.Health(None, True, (STATS,)))
    assert board.answer("/health/ready") == board.answer("/health") == (200, {"status": "overloaded"})
    status, document = board.answer("/health/progress") or (0, {})
    assert (status, document["total_blocks"], document["last_step_age_seconds"]) == (200, STATS.total_blocks, None)
    assert board.answer("/metrics") is None
    later = time.monotonic() + 61
    monkeypatch.setattr(health_port.time, "monotonic", lambda: later)
    for path, status in (("/health/live", "stuck"), ("/health/ready", "unready")):
        reason = "the API process has given no sign of life for 61 s"
        assert board.answer(path) == (503, {"status": status, "reason": reason})


def test_connections_are_bounded(listening: HealthServer) -> None:
    """Who holds them all is cut off after CONNECTION_SECONDS; until then one more is closed at once."""
    host, port = listening.server_address[:2]
    held = [socket.create_connection((str(host), port), timeout=5) for _ in range(MAX_CONNECTIONS)]
    with socket.create_connection((str(host), port), timeout=5) as one_more:
        assert one_more.recv(1) == b""
    held.pop().close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            assert httpx.get(f"http://{host}:{port}/health/live").json() == {"status": "ok"}
            break
        except httpx.TransportError:
            time.sleep(0.02)
    else:
        pytest.fail("the place was not given back")
    for connection in held:
        connection.close()


def test_a_port_that_is_taken_is_said_plainly(listening: HealthServer, board: HealthBoard) -> None:
    port = listening.server_address[1]
    with pytest.raises(OptionError, match=rf"cannot listen on 127.0.0.1 port {port} \(health_port\)"):
        HealthServer("127.0.0.1", port, board)
