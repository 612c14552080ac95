"""What is no proper HTTP, and what is HTTP at its limits: over bare sockets, against the bounded protocol."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.end_to_end.conftest import Server
from tests.end_to_end.local_app import serve_app
from tests.end_to_end.neighbour import Neighbour
from tests.server.fakes import MODEL, FakeEngine, make_app, says

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

JSON = b"Content-Type: application/json\r\n"
CLOSE = b"Connection: close\r\n"


def _request(method: bytes, path: bytes, headers: bytes = CLOSE, body: bytes | None = None) -> bytes:
    length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
    return b"%b %b HTTP/1.1\r\nHost: x\r\n%b%b\r\n%b" % (method, path, headers, length, body or b"")


def _post(headers: bytes, rest: bytes = b"") -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + JSON + CLOSE + headers + b"\r\n" + rest


CASES = {
    "noise": (b"\x00\xff\x13 noise\r\n\r\n", 400),
    "TLS": (bytes.fromhex("16030100f8010000f40303") + b"x" * 100, 400),
    "HTTP/2 with prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "unknown method": (_request(b"BREW", b"/v1/models"), 400),
    "CONNECT": (b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "CONNECT with a URL": (b"CONNECT http://example.org/x HTTP/1.1\r\nHost: x\r\nUpgrade: a\r\n\r\n", 400),
    "bytes in the path": (_request(b"GET", b"/v1/models/\xff\xfe"), 400),
    "escaped bytes in the path": (_request(b"GET", b"/v1/models/%ff%fe%00%0d%0a"), 404),
    "path upwards": (_request(b"GET", b"/v1/models/../../etc/passwd"), 404),
    "a slash too many": (_request(b"POST", b"/v1/completions/", JSON + CLOSE, b"{}"), 404),
    "negative length": (_post(b"Content-Length: -5\r\n"), 400),
    "length of many digits": (_post(b"Content-Length: " + b"9" * 40 + b"\r\n"), 400),
    "two lengths": (_post(b"Content-Length: 2\r\nContent-Length: 3\r\n", b"{} "), 400),
    "length and chunks": (_post(b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"), 400),
    "bad chunk": (_post(b"Transfer-Encoding: chunked\r\n", b"zz\r\n\r\n"), 400),
    "too long a body": (_post(b"Content-Length: 9999999999\r\n", b"{}"), 413),
    "chunked body": (_post(b"Transfer-Encoding: chunked\r\n", b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"), 400),
    "no body": (_post(b""), 400),
    "gzip": (_post(b"Content-Encoding: gzip\r\nContent-Length: 4\r\n", b"\x1f\x8b\x08\x00"), 415),
    "control byte in a header": (_request(b"GET", b"/v1/models", b"X-A: a\x01b\r\n" + CLOSE), 400),
    "folded header": (_request(b"GET", b"/v1/models", b"X-A: a\r\n b\r\n" + CLOSE), 400),
    "request id that is none": (_request(b"GET", b"/v1/models", b"X-Request-Id: \xff<script>\r\n" + CLOSE), 200),
    "long path": (_request(b"GET", b"/v1/models/" + b"a" * 70_000), 431),
    "long header": (_request(b"GET", b"/v1/models", b"X-A: " + b"a" * 2_000_000 + b"\r\n"), 431),
    "many headers": (_request(b"GET", b"/v1/models", b"X-A: b\r\n" * 20_000), 431),
    "WebSocket": (_request(b"GET", b"/v1/models", b"Upgrade: websocket\r\nConnection: Upgrade, close\r\n"), 200),
    "HTTP/1.0": (b"GET /v1/models HTTP/1.0\r\n\r\n", 200),
}


def _connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def _read(connection: socket.socket) -> bytes:
    """Everything until the server closes; a reset counts as closing."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            data += part
    return data


def _read_one(connection: socket.socket) -> bytes:
    """One answer, by its length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65_536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65_536)
    return head + b"\r\n\r\n" + body


def _exchange(url: str, request: bytes) -> bytes:
    with _connect(url) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request)
        return _read(connection)


def _status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def _error(answer: bytes) -> dict[str, object]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return dict(json.loads(body)["error"])


@pytest.fixture(scope="module")
def busy_server(server: Server) -> Iterator[Server]:
    """With somebody else at work, who must notice nothing."""
    with Neighbour(server):
        yield server
    server.wait_for(server.is_idle, 10, "idleness")


@pytest.mark.parametrize(("request_bytes", "status"), CASES.values(), ids=CASES)
def test_strange_requests(busy_server: Server, request_bytes: bytes, status: int) -> None:
    answer = _exchange(busy_server.url, request_bytes)
    assert _status(answer) == status, answer[:300]
    if status != 200:
        assert _error(answer)["message"]
    assert b"<script>" not in answer


def test_pipelined_requests_are_answered_in_order(busy_server: Server) -> None:
    many = _request(b"GET", b"/health/live", b"") * 20 + _request(b"GET", b"/v1/models")
    answer = _exchange(busy_server.url, many)
    assert answer.count(b"HTTP/1.1 200 OK") == 21
    assert answer.index(b'{"status":"ok"}') < answer.index(b'{"object":"list"')


def test_noise_after_a_request_ends_the_connection(busy_server: Server) -> None:
    with _connect(busy_server.url) as connection:
        connection.sendall(_request(b"GET", b"/health/live", b""))
        assert _status(_read_one(connection)) == 200
        connection.sendall(b"\x01\x02 noise\r\n\r\n")
        assert _status(_read(connection)) == 400


def test_many_offers_of_another_protocol_at_once(busy_server: Server) -> None:
    offer = _request(b"GET", b"/health/live", b"Connection: upgrade\r\nUpgrade: a\r\n")
    answer = _exchange(busy_server.url, offer * 1000 + _request(b"GET", b"/health/live"))
    assert answer.count(b"HTTP/1.1 200 OK") == 1001


def test_noise_behind_waiting_requests_is_not_answered_within_a_stream() -> None:
    app = make_app(FakeEngine(script=says("hello hello"), hold_after=3))
    body = json.dumps({"model": MODEL, "prompt": "hi", "stream": True}).encode()
    with serve_app(app) as url, _connect(url) as connection:
        connection.sendall(_request(b"POST", b"/v1/completions", JSON, body))
        answer = b""
        while answer.count(b"data: ") < 2:
            answer += connection.recv(65_536)
        connection.sendall(_request(b"GET", b"/health/live", b""))
        connection.sendall(b"\x01\x02 noise\r\n\r\n")
        answer += _read(connection)
    assert answer.count(b"HTTP/1.1 ") == 1


def test_connection_is_kept_after_refusals(busy_server: Server) -> None:
    bad = _request(b"POST", b"/v1/completions", JSON, b"{")
    with _connect(busy_server.url) as connection:
        for _ in range(5):
            connection.sendall(bad)
            assert _status(_read_one(connection)) == 400
        connection.sendall(_request(b"GET", b"/health/live"))
        assert _status(_read(connection)) == 200


def test_client_that_leaves_in_the_middle_of_a_body(busy_server: Server) -> None:
    for _ in range(20):
        with _connect(busy_server.url) as connection:
            connection.sendall(_post(b"Content-Length: 100\r\n", b'{"model":'))
    assert _status(_exchange(busy_server.url, _request(b"GET", b"/health/ready"))) == 200


@pytest.fixture(scope="module")
def impatient() -> Iterator[str]:
    """A gateway with short limits, and keys."""
    app = make_app(FakeEngine(script=says("hello")), body_timeout=0.5, api_key=("sk-good",))
    with serve_app(app, max_head_bytes=2000, patience=0.5) as url:
        yield url


GOOD = b"Authorization: Bearer sk-good\r\n"


def test_slow_head_gets_408(impatient: str) -> None:
    with _connect(impatient) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost:")
        start = time.monotonic()
        answer = _read(connection)
    assert _status(answer) == 408
    assert "0.5 s" in str(_error(answer)["message"])
    assert 0.3 < time.monotonic() - start < 5


def test_head_that_drips_gets_408(impatient: str) -> None:
    """Bytes in time do not help when the whole does not come in time."""
    with _connect(impatient) as connection:
        connection.settimeout(0.05)
        start = time.monotonic()
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n")
        answer = b""
        while not answer and time.monotonic() - start < 5:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(b"X: y\r\n")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65_536)
    assert _status(answer) == 408


def test_slow_body_gets_408(impatient: str) -> None:
    with _connect(impatient) as connection:
        connection.sendall(_post(GOOD + b"Content-Length: 100\r\n", b'{"model":'))
        answer = _read(connection)
    assert _status(answer) == 408
    assert _error(answer)["type"] == "timeout_error"


def test_silent_connection_is_closed(impatient: str) -> None:
    with _connect(impatient) as connection:
        assert _read(connection) == b""


def test_head_has_its_limit_to_the_byte_or_nearly(impatient: str) -> None:
    for size, status in ((1500, 200), (2500, 431)):
        headers = GOOD + CLOSE + b"X: " + b"a" * size + b"\r\n"
        assert _status(_exchange(impatient, _request(b"GET", b"/v1/models", headers))) == status


def test_limit_of_heads_is_none_of_bodies(impatient: str) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hi", "metadata": {"a": "x" * 50_000}}).encode()
    answer = _exchange(impatient, _request(b"POST", b"/v1/completions", JSON + CLOSE + GOOD, body))
    assert _status(answer) == 200
    twice = _request(b"POST", b"/v1/completions", JSON + GOOD, body) * 2 + _request(b"GET", b"/health/live")
    assert _exchange(impatient, twice).count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Authorization: Bearer \xff\xfe\xe9\r\n",
        b"Authorization: Bearer\r\n",
        b"Authorization: Bearer sk-good\xc2\xa0\r\n",
        b"Authorization: Basic sk-good\r\n",
        b"Authorization: " + b"Bearer " * 100 + b"\r\n",
        "Authorization: Bearer ｓｋ-good\r\n".encode(),
        b"X-Api-Key: sk-goo\r\n",
    ],
    ids=range(8),
)
def test_bad_keys(impatient: str, header: bytes) -> None:
    answer = _exchange(impatient, _request(b"GET", b"/v1/models", header + CLOSE))
    assert _status(answer) == 401
    assert _error(answer)["code"] == "invalid_api_key"


def test_good_key_in_any_case_of_the_scheme(impatient: str) -> None:
    spellings = (
        b"authorization: bearer sk-good\r\n",
        b"AUTHORIZATION: BEARER   sk-good  \r\n",
        b"X-Api-Key: sk-good\r\n",
    )
    for header in (GOOD, *spellings):
        assert _status(_exchange(impatient, _request(b"GET", b"/v1/models", header + CLOSE))) == 200
