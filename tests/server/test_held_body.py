"""Bodies with images wait for the decoder: their bytes are bounded together, their time is, and nothing keeps them."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from tests.server.exchange import Exchange, call, run
from tests.server.fakes import MODEL, FakeEngine
from tests.server.image_fakes import FakePipeline, image_app, image_part

CHAT = "/v1/chat/completions"
LIMIT = 300_000
SMALL = 64 * 1024


def body_of(size: int, **fields: object) -> bytes:
    """A conversation with one image; so many bytes are added to its URL."""
    message = {"role": "user", "content": [image_part(f"data:28x56,{'A' * size}")]}
    return json.dumps({"model": MODEL, "messages": [message], **fields}).encode()


def begin(app: FastAPI, raw: bytes, path: str = CHAT, *, more: bool = False) -> tuple[Exchange, "asyncio.Task[Any]"]:
    exchange = Exchange(app, "POST", path)
    exchange.header("content-type", "application/json")
    for start in range(0, len(raw), 50_000):
        exchange.give(raw[start : start + 50_000], more=more or start + 50_000 < len(raw))
    return exchange, asyncio.create_task(exchange.run())


async def waits(pipeline: FakePipeline, number: int) -> None:
    while len(pipeline.calls) < number:
        await asyncio.sleep(0.001)


def test_bodies_are_bounded_together_until_their_images_are_ready() -> None:
    engine = FakeEngine()
    app, pipeline = image_app(engine, max_held_body_bytes=LIMIT)

    async def scenario() -> None:
        pipeline.hold = asyncio.Event()
        first = begin(app, body_of(200_000))[1]
        await waits(pipeline, 1)
        refused = await begin(app, body_of(240_000))[1]
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert "the bodies of other requests have" in refused.error["message"]
        small = begin(app, body_of(SMALL - 500))[1]
        second = begin(app, body_of(100_000))[1]
        await waits(pipeline, 3)
        pipeline.hold.set()
        assert [answer.status for answer in await asyncio.gather(first, second, small)] == [200] * 3
        assert (await begin(app, body_of(LIMIT))[1]).status == 200, "what is alone always fits"

    run(scenario())


def test_large_bodies_do_not_grow_while_memory_is_short() -> None:
    engine = FakeEngine()
    app, _ = image_app(engine, max_held_body_bytes=LIMIT)

    async def scenario() -> None:
        engine.memory_is_short = True
        refused = await begin(app, body_of(SMALL + 50_000))[1]
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert (await begin(app, body_of(SMALL - 500))[1]).status == 200
        engine.memory_is_short = False
        assert (await begin(app, body_of(SMALL + 50_000))[1]).status == 200

    run(scenario())


def test_a_stream_holds_no_body() -> None:
    engine = FakeEngine(hold_after=1)
    app, _ = image_app(engine, max_held_body_bytes=LIMIT)

    async def scenario() -> None:
        streams = [begin(app, body_of(250_000, stream=True)) for _ in range(1)]
        await streams[0][0].wrote.wait()
        streams.append(begin(app, body_of(250_000, stream=True)))
        await asyncio.wait_for(streams[1][0].wrote.wait(), 10)
        assert [exchange.answer.status for exchange, _ in streams] == [200, 200]
        for exchange, _ in streams:
            exchange.leave()
        await asyncio.gather(*(task for _, task in streams))

    run(scenario())


@pytest.mark.parametrize("left", ["at once", "in the middle"])
def test_a_client_that_leaves_takes_its_body_along(left: str) -> None:
    app, pipeline = image_app(FakeEngine(), max_held_body_bytes=LIMIT)

    async def scenario() -> None:
        pipeline.hold = asyncio.Event()
        for number in range(3):
            raw = body_of(250_000)
            if left == "in the middle":
                exchange, working = begin(app, raw[:200_000], more=True)
                while not exchange.inbox.empty():
                    await asyncio.sleep(0)
            else:
                exchange, working = begin(app, raw)
                await waits(pipeline, 1 + number)
            exchange.leave()
            await working
        pipeline.hold.set()
        assert (await begin(app, body_of(250_000))[1]).status == 200

    run(scenario())


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_preparing_images_counts_against_the_time_of_a_request(path: str) -> None:
    engine = FakeEngine(request_timeout=0.05)
    app, pipeline = image_app(engine)

    async def scenario() -> None:
        pipeline.hold = asyncio.Event()
        answer = await begin(app, body_of(10), path)[1]
        assert (answer.status, answer.error["type"]) == (408, "timeout_error")

    run(scenario())
    assert (engine.requests, engine.reserved) == ([], 0)


def test_images_that_are_only_counted_need_a_place_too() -> None:
    engine = FakeEngine(places=1)
    app, pipeline = image_app(engine)
    text = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()

    async def scenario() -> None:
        pipeline.hold = asyncio.Event()
        first = begin(app, body_of(10), "/tokenize")[1]
        await waits(pipeline, 1)
        assert (await call(app, "POST", "/tokenize", body_of(11))).status == 429
        assert (await call(app, "POST", "/tokenize", text)).status == 200
        pipeline.hold.set()
        assert (await first).status == 200

    run(scenario())
    assert engine.reserved == 0
