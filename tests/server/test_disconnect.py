"""Clients that leave, or stop reading: the work ends at once, whatever ASGI version the server speaks."""

import asyncio
import json
import logging
from typing import Any

import pytest
from fastapi import FastAPI

from server.generation import GenerationRequest
from server.wire import Event
from tests.server.exchange import Exchange, chat, complete, run
from tests.server.fakes import FakeEngine, make_app, says
from tests.server.test_stream import ends

VERSIONS = pytest.mark.parametrize("spec_version", ["2.3", "2.4"])


def begin(app: FastAPI, spec_version: str = "2.3", **fields: Any) -> Exchange:
    """A chat request whose body was sent."""
    exchange = Exchange(app, "POST", "/v1/chat/completions", spec_version=spec_version)
    exchange.header("content-type", "application/json")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]} | fields
    exchange.give(json.dumps(body).encode())
    return exchange


async def settle(engine: FakeEngine, delivered: int) -> None:
    """Until each stream has delivered so many events."""
    while not engine.streams or any(stream.delivered < delivered for stream in engine.streams):
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)


@VERSIONS
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("events", [0, 1, 3])
def test_leaving_cancels_every_choice(
    spec_version: str, n: int, stream: bool, events: int, caplog: pytest.LogCaptureFixture
) -> None:
    """H37: in the queue and in prefill (no event yet), in decode; streamed or not."""
    engine = FakeEngine(hold_after=events)
    app = make_app(engine)

    async def scenario() -> float:
        exchange = begin(app, spec_version, n=n, stream=stream)
        running = asyncio.create_task(exchange.run())
        await settle(engine, events)
        assert engine.live == n
        left = asyncio.get_running_loop().time()
        exchange.leave()
        await running
        return asyncio.get_running_loop().time() - left

    with caplog.at_level(logging.INFO, logger="firstlight.access"):
        seconds = run(scenario())
    assert seconds < 1
    assert (engine.live, engine.reserved) == (0, 0)
    assert engine.streams[0].cancelled == list(range(n))
    assert [record.getMessage().split()[2] for record in caplog.records] == ["499"]


@VERSIONS
def test_many_that_leave_hold_nothing_back(spec_version: str) -> None:
    engine = FakeEngine(hold_after=3, places=400)
    app = make_app(engine, access_log=False)

    async def scenario() -> None:
        exchanges = [begin(app, spec_version, n=1 + number % 2, stream=number % 3 > 0) for number in range(200)]
        running = [asyncio.create_task(exchange.run()) for exchange in exchanges]
        await settle(engine, 3)
        for exchange in exchanges:
            exchange.leave()
        await asyncio.gather(*running)

    run(scenario())
    assert (engine.live, engine.reserved, engine.cancelled) == (0, 0, 300)
    engine.hold_after = None
    assert chat(app).status == 200


@VERSIONS
def test_leaving_before_the_body_is_complete(spec_version: str) -> None:
    engine = FakeEngine()
    app = make_app(engine)

    async def scenario() -> None:
        exchange = Exchange(app, "POST", "/v1/chat/completions", spec_version=spec_version)
        exchange.header("content-type", "application/json")
        exchange.give(b'{"model": ', more=True)
        running = asyncio.create_task(exchange.run())
        while not engine.reserved:
            await asyncio.sleep(0)
        exchange.leave()
        await running

    run(scenario())
    assert (engine.reserved, engine.streams) == (0, [])


@VERSIONS
def test_a_client_that_stops_reading_pulls_no_more(spec_version: str) -> None:
    """At most one chunk is in flight, so memory does not grow; leaving still cancels at once."""
    engine = FakeEngine(script=says("x" * 400))
    app = make_app(engine)

    async def scenario() -> None:
        exchange = begin(app, spec_version, stream=True)
        running = asyncio.create_task(exchange.run())
        await exchange.wrote.wait()
        exchange.may_write.clear()
        await asyncio.sleep(0.05)
        seen = engine.streams[0].delivered
        await asyncio.sleep(0.05)
        assert engine.streams[0].delivered == seen < 400
        exchange.leave()
        await running

    run(scenario())
    assert engine.streams[0].cancelled == [0]


def test_a_finished_stream_cancels_nothing() -> None:
    engine = FakeEngine()
    assert chat(make_app(engine), stream=True, n=2).complete
    assert engine.cancelled == 0


def test_several_prompts_are_all_cancelled() -> None:
    engine = FakeEngine(hold_after=1)
    app = make_app(engine)

    async def scenario() -> None:
        exchange = Exchange(app, "POST", "/v1/completions")
        exchange.header("content-type", "application/json")
        exchange.give(b'{"model": "tiny", "prompt": ["a", "b", "c"], "n": 2, "stream": true}')
        running = asyncio.create_task(exchange.run())
        await settle(engine, 1)
        exchange.leave()
        await running

    run(scenario())
    assert engine.cancelled == 6


def test_one_failing_prompt_cancels_the_others() -> None:
    def script(request: GenerationRequest, choice: int) -> list[Event | Exception]:
        return (says("hello") if request.prompt_ids[0] == 5 else ends("error"))(request, choice)

    engine = FakeEngine(script=script)
    answer = complete(make_app(engine), prompt=[[5], [6]])
    assert answer.status == 500
    assert engine.live == 0
