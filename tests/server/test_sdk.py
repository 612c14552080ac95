"""The official `openai` client and curl-like raw sockets, against the gateway on a real socket."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import uvicorn

from server.errors import InternalError
from tests.server.fakes import FakeEngine, ids_of, make_app, says
from tests.server.test_stream import raises

HI = [{"role": "user", "content": "hi"}]
TEXT = "hello 访问👩 world"


@contextmanager
def serving(engine: FakeEngine, **options: Any) -> Iterator[int]:
    """The port of a gateway that runs in a thread, on loopback."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    app = make_app(engine, access_log=False, **options)
    server = uvicorn.Server(uvicorn.Config(app, loop="uvloop", http="httptools", log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def port(engine: FakeEngine) -> Iterator[int]:
    with serving(engine, api_key=("sesame",)) as port:
        yield port


@pytest.fixture(autouse=True)
def _script(engine: FakeEngine) -> None:
    engine.script, engine.hold_after, engine.places = says(TEXT, cached=16), None, 1000
    engine.streams.clear()


@pytest.fixture
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="sesame", max_retries=0, timeout=20) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, n=2, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert answer.usage.completion_tokens == 2 * (len(ids_of(TEXT)) + 1)
    assert b"".join(bytes(entry.bytes) for entry in answer.choices[0].logprobs.content) == TEXT.encode()


def test_chat_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + len(ids_of(TEXT)) + 1


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=HI) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["ahello ", "bhello "]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    with client.completions.create(model="tiny", prompt="a", max_tokens=50, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "firstlight"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_raw_response(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=HI, extra_body={"zebra": 1})
    assert raw.headers["x-ignored-params"] == "zebra"
    completion = raw.parse()
    assert completion._request_id == raw.headers["x-request-id"]
    assert completion.choices[0].message.content == TEXT


def test_errors_have_the_types_of_the_sdk(client: openai.OpenAI, port: int, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HI, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 999}], stream=True)
    with pytest.raises(openai.AuthenticationError) as denied:
        client.with_options(api_key="wrong").models.list()
    assert denied.value.code == "invalid_api_key"
    engine.places = 0
    with pytest.raises(openai.RateLimitError) as full:
        client.chat.completions.create(model="tiny", messages=HI)
    assert full.value.response.headers["retry-after"] == "1"


def test_overload_is_smoothed_by_the_clients_retries(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.places = 0
    threading.Timer(0.3, setattr, (engine, "places", 10)).start()
    answer = client.with_options(max_retries=2).chat.completions.create(model="tiny", messages=HI)
    assert answer.choices[0].message.content == TEXT


def test_failure_in_mid_stream_is_an_api_error(client: openai.OpenAI, engine: FakeEngine) -> None:
    """H01."""
    engine.script = raises(InternalError("The engine failed."), "ab")
    seen = []
    with client.chat.completions.create(model="tiny", messages=HI, stream=True) as stream:
        chunks = (seen.append(chunk.choices[0].delta.content) for chunk in stream)
        with pytest.raises(openai.APIError, match="The engine failed"):
            list(chunks)
    assert seen == ["", "a", "b"]


def test_async(port: int) -> None:
    async def scenario() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="sesame", max_retries=0, timeout=20
        ) as client:

            async def stream() -> str:
                chunks = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            whole = client.chat.completions.create(model="tiny", messages=HI)
            texts = await asyncio.gather(*(stream() for _ in range(8)))
            return [*texts, (await whole).choices[0].message.content or ""]

    assert asyncio.run(scenario()) == [TEXT] * 9


def raw_request(*, stream: bool, n: int) -> bytes:
    """A chat request as it goes over the wire."""
    body = json.dumps({"model": "tiny", "messages": HI, "stream": stream, "n": n}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sesame\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def wait_for(condition: object) -> float:
    """Seconds until it holds; fails after five."""
    begun = time.monotonic()
    while not condition():  # type: ignore[operator]
        assert time.monotonic() - begun < 5
        time.sleep(0.005)
    return time.monotonic() - begun


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("events", [0, 2])
def test_closing_the_socket_cancels(port: int, engine: FakeEngine, stream: bool, events: int) -> None:
    engine.hold_after = events
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(raw_request(stream=stream, n=2))
        wait_for(lambda: engine.live == 2 and engine.streams[0].delivered >= events)
    assert wait_for(lambda: engine.live == 0) < 2
    assert engine.cancelled == 2


def test_a_reader_that_stops_holds_the_stream_back(port: int, engine: FakeEngine) -> None:
    """The socket's buffers fill up; after that nothing more is pulled from the engine."""
    engine.script = says("x" * 400)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(raw_request(stream=True, n=128))
        wait_for(lambda: engine.streams and engine.streams[0].delivered)
        seen = -1
        while seen != engine.streams[0].delivered:
            seen = engine.streams[0].delivered
            time.sleep(0.3)
        assert 0 < seen < 128 * 400
    wait_for(lambda: engine.live == 0)


def test_the_connection_survives_errors(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    headers = {"authorization": "Bearer sesame", "content-type": "application/json"}
    statuses = []
    for method, path, body in (
        ("POST", "/v1/chat/completions", b"{"),
        ("GET", "/nothing", None),
        ("PUT", "/v1/models", b"x" * 100_000),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "a"}'),
    ):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        response.read()
        statuses.append(response.status)
    connection.close()
    assert statuses == [400, 404, 405, 200]
