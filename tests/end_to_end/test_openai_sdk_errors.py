"""The official `openai` SDK when things go wrong: error classes and fields, retries, time-outs, cancelled streams."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from server.errors import Unavailable
from server.generation import GenerationRequest
from server.wire import Event
from tests.end_to_end.conftest import Server
from tests.end_to_end.local_app import serve_app
from tests.server.fakes import MODEL, FakeEngine, Script, make_app, says

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none") as made:
        yield made


def test_errors_have_their_classes_and_fields(client: OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=FRANCE)
    assert (unknown.value.status_code, unknown.value.code, unknown.value.param) == (404, "model_not_found", "model")
    assert unknown.value.type == "invalid_request_error"
    assert unknown.value.request_id
    assert "`gpt-9` does not exist" in unknown.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=server.model, messages=FRANCE, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=server.model, prompt="word " * 20_000, stream=True)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    assert isinstance(long.value.body, dict)
    assert long.value.body["n_prompt_tokens"] > long.value.body["n_ctx"]
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="x")


def test_client_timeout_and_closing_a_stream_cancel(client: OpenAI, server: Server) -> None:
    endless: dict[str, Any] = {
        "model": server.model,
        "prompt": "Once",
        "max_tokens": 4000,
        "extra_body": {"ignore_eos": True},
    }
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5, max_retries=0).completions.create(**endless)
    server.wait_for(server.is_idle, 10, "idleness after a timeout")
    with client.completions.create(**endless, stream=True) as stream:
        next(iter(stream))
        assert not server.is_idle()
    server.wait_for(server.is_idle, 10, "idleness after a closed stream")


def test_async_cancel_in_mid_stream(server: Server) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            started = asyncio.Event()

            async def read() -> None:
                stream = await client.completions.create(
                    model=server.model, prompt="Once", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
                )
                async for _ in stream:
                    started.set()

            reading = asyncio.create_task(read())
            await asyncio.wait_for(started.wait(), 30)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading

    asyncio.run(run())
    server.wait_for(server.is_idle, 10, "idleness after a cancelled task")


def test_authentication() -> None:
    with serve_app(make_app(FakeEngine(script=says("hello")), api_key=("sk-other", "sk-good"))) as url:
        with OpenAI(base_url=url + "/v1", api_key="sk-good") as client:
            answer = client.chat.completions.create(model=MODEL, messages=FRANCE)
            assert answer.choices[0].message.content == "hello"
            for wrong in ("sk-wrong", "sk-goo", "sk-good2"):
                with pytest.raises(openai.AuthenticationError) as error:
                    client.with_options(api_key=wrong).models.list()
                assert (error.value.status_code, error.value.code) == (401, "invalid_api_key")
                assert error.value.response.headers["www-authenticate"] == "Bearer"
                assert error.value.request_id
                assert wrong not in error.value.message
        assert httpx.get(url + "/v1/models").status_code == 401
        assert httpx.get(url + "/health/live").status_code == 200


def test_overload_is_retried_by_the_sdk_and_then_a_rate_limit_error() -> None:
    engine = FakeEngine(script=says("hello"), places=0)
    with serve_app(make_app(engine)) as url, OpenAI(base_url=url + "/v1", api_key="none") as client:
        with pytest.raises(openai.RateLimitError) as error:
            client.with_options(max_retries=0).chat.completions.create(model=MODEL, messages=FRANCE)
        assert (error.value.status_code, error.value.code) == (429, "server_overloaded")
        assert isinstance(error.value, openai.APIStatusError)
        assert int(error.value.response.headers["retry-after"]) >= 1
        tries: list[int] = []

        def make_room(request: httpx.Request) -> None:
            tries.append(engine.places)
            engine.places = len(tries) - 1

        with OpenAI(base_url=url + "/v1", api_key="none") as retrying:
            retrying._client.event_hooks = {"request": [make_room]}
            answer = retrying.chat.completions.create(model=MODEL, messages=FRANCE)
        assert answer.choices[0].message.content == "hello"
        assert len(tries) == 2


def test_error_in_mid_stream_is_raised() -> None:
    engine = FakeEngine(script=says("hello world" * 5))
    engine.script = _breaks_off(engine.script)
    with serve_app(make_app(engine)) as url, OpenAI(base_url=url + "/v1", api_key="none") as client:
        stream = client.chat.completions.create(model=MODEL, messages=FRANCE, stream=True)
        seen = []
        with pytest.raises(openai.APIError) as error:
            seen.extend(stream)
        assert error.value.message == "the engine is gone"


def _breaks_off(script: Script) -> Script:
    def broken(request: GenerationRequest, choice: int) -> list[Event | Exception]:
        return [*script(request, choice)[:3], Unavailable("the engine is gone")]

    return broken
