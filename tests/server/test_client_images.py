"""Pixels travel once for all live sequences that show them, again when the engine lacks them, and within bounds."""

import asyncio
from array import array
from pathlib import Path

import pytest
import zmq.asyncio

from scheduler.request import PixelsMissing, PromptImages, SamplingParams, Span
from server import wire
from server.client_pixels import PixelLedger
from server.errors import BadRequest, Overloaded
from server.generation import GenerationRequest, RequestStream
from server.wire_submit import unpack_images
from tests.server.test_client import MAX_IMAGE_BYTES, NEXT_STATS, STATS, Wires, run
from tests.server.test_wire import BLUE, RED, image

BYTES = 18
"""Of the pixels of an image of 2 x 3."""


def shows(*keys: bytes, n: int = 1, tiles: int = 1) -> GenerationRequest:
    images = PromptImages(
        images=tuple(image(key, tiles=tiles) for key in keys),
        spans=tuple(Span(1 + 4 * index, 4, index, 0) for index in range(len(keys))),
    )
    ids = array("i", range(2 + 4 * len(keys)))
    return GenerationRequest(prompt_ids=ids, sampling=SamplingParams(max_tokens=4), n=n, images=images)


class Talk:
    """A client and its engine."""

    def __init__(self, wires: Wires, engine: "zmq.asyncio.Socket") -> None:
        self.wires, self.engine = wires, engine

    def submit(self, *keys: bytes, n: int = 1, tiles: int = 1) -> RequestStream:
        client = self.wires.client
        return client.submit([shows(*keys, n=n, tiles=tiles)], client.admit())[0]

    async def hears(self) -> tuple[int, list[bytes]]:
        """(sequence, keys whose pixels it brings) of the next message, which must be consistent."""
        frame, *pixels = await asyncio.wait_for(self.engine.recv_multipart(), 5)
        message = wire.decode_to_engine(frame)
        assert isinstance(message, wire.Submit)
        images = unpack_images(message, pixels).images
        for found in images:
            assert found.pixels is None or bytes(found.pixels.data) == bytes(image(found.key).pixels.data)  # type: ignore[union-attr]
        return message.seq_id, [found.key for found in images if found.pixels is not None]

    async def says(self, *events: wire.Event) -> None:
        await self.engine.send(wire.encode(wire.Events(list(events), STATS)))

    async def lacks(self, seq_id: int) -> None:
        await self.says(wire.Event(seq_id, refusal=PixelsMissing.__name__, message="none of these"))

    async def ends(self, seq_id: int) -> None:
        await self.says(wire.Event(seq_id, [7], finish_reason="stop"))
        async with asyncio.timeout(5):
            while self.wires.client._sequences.get(seq_id) is not None:
                await asyncio.sleep(0.001)


def talk(tmp_path: Path, scenario: "object") -> None:
    async def main(wires: Wires) -> None:
        engine = await wires.greet(0)
        await wires.ready(True)
        await scenario(Talk(wires, engine))  # type: ignore[operator]

    run(tmp_path, main)


def test_the_first_live_sequence_brings_pixels(tmp_path: Path) -> None:
    async def scenario(talk: Talk) -> None:
        talk.submit(RED, BLUE, RED, n=3)
        assert [await talk.hears() for _ in range(3)] == [(1, [RED, BLUE]), (2, []), (3, [])]
        talk.submit(BLUE)
        assert await talk.hears() == (4, [])
        for seq_id in (1, 2, 3, 4):
            await talk.ends(seq_id)
        talk.submit(BLUE)
        assert await talk.hears() == (5, [BLUE])

    talk(tmp_path, scenario)


def test_pixels_stay_while_anybody_shows_them(tmp_path: Path) -> None:
    async def scenario(talk: Talk) -> None:
        talk.submit(RED)
        talk.submit(RED)
        await talk.hears()
        await talk.hears()
        await talk.ends(1)
        talk.submit(RED)
        assert await talk.hears() == (3, [])
        assert talk.wires.client._pixels.num_bytes == BYTES

    talk(tmp_path, scenario)


def test_an_engine_that_lacks_pixels_gets_them(tmp_path: Path) -> None:
    """Two choices whose image's first sequence ended before they arrived: one of them brings it."""

    async def scenario(talk: Talk) -> None:
        talk.submit(RED)
        stream = talk.submit(RED, BLUE, n=2)
        assert [await talk.hears() for _ in range(3)] == [(1, [RED]), (2, [BLUE]), (3, [])]
        await talk.ends(1)
        await talk.lacks(2)
        await talk.lacks(3)
        assert [await talk.hears() for _ in range(2)] == [(2, [RED, BLUE]), (3, [])]
        await talk.ends(2)
        await talk.ends(3)
        assert [event.token_ids async for _, event in stream.events()] == [[7], [7]], "it noticed nothing"
        assert talk.wires.client.idle

    talk(tmp_path, scenario)


def test_what_another_sequence_keeps_there_is_not_sent_again(tmp_path: Path) -> None:
    """Of two images one is lost with its only sequence; the other one's first sequence still runs."""

    async def scenario(talk: Talk) -> None:
        talk.submit(RED)
        talk.submit(BLUE)
        talk.submit(RED)
        talk.submit(RED, BLUE)
        assert [await talk.hears() for _ in range(4)] == [(1, [RED]), (2, [BLUE]), (3, []), (4, [])]
        await talk.ends(2)
        await talk.ends(3)
        await talk.lacks(4)
        assert await talk.hears() == (4, [BLUE])

    talk(tmp_path, scenario)


def test_a_refusal_after_the_end_is_of_no_concern(tmp_path: Path) -> None:
    async def scenario(talk: Talk) -> None:
        talk.submit(RED).close()
        assert await talk.hears() == (1, [RED])
        assert wire.decode_to_engine(await talk.engine.recv()) == wire.Abort([1])
        await talk.lacks(1)
        talk.submit(BLUE)
        assert await talk.hears() == (2, [BLUE])

    talk(tmp_path, scenario)


def test_a_new_engine_has_nothing(tmp_path: Path) -> None:
    async def scenario(talk: Talk) -> None:
        talk.submit(RED)
        assert await talk.hears() == (1, [RED])
        await talk.wires.peer(wire.SUPERVISOR).send(wire.encode(wire.EngineDown(0, "killed")))
        await talk.wires.ready(False)
        talk.engine = await talk.wires.greet(1)
        await talk.wires.ready(True)
        assert await talk.hears() == (1, [RED])
        talk.submit(RED)
        assert await talk.hears() == (2, [])
        assert talk.wires.client._pixels.num_bytes == BYTES

    talk(tmp_path, scenario)


def test_what_is_live_is_bounded(tmp_path: Path) -> None:
    most = MAX_IMAGE_BYTES // BYTES

    async def scenario(talk: Talk) -> None:
        with pytest.raises(BadRequest, match=f"have {(most + 1) * BYTES} bytes .* {MAX_IMAGE_BYTES} is the limit"):
            talk.submit(RED, tiles=most + 1)
        talk.submit(RED, tiles=most)
        await talk.engine.recv_multipart()
        talk.submit(RED, tiles=most)
        with pytest.raises(Overloaded, match=f"have {most * BYTES} bytes"):
            talk.submit(BLUE)
        assert talk.wires.client.reserved == 2, "the door gives the places of refused requests back"
        await talk.ends(1)
        await talk.ends(2)
        talk.submit(BLUE)

    talk(tmp_path, scenario)


def test_what_is_on_its_way_is_bounded(tmp_path: Path) -> None:
    """Clients that leave at once, while the engine is in a long step."""
    most = MAX_IMAGE_BYTES // BYTES

    async def scenario(talk: Talk) -> None:
        talk.submit(RED, tiles=most).close()
        assert talk.wires.client._pixels.num_bytes == 0
        with pytest.raises(Overloaded):
            talk.submit(BLUE)
        await talk.engine.send(wire.encode(NEXT_STATS))
        await talk.wires.heard(NEXT_STATS)
        talk.submit(BLUE)

    talk(tmp_path, scenario)


def test_what_is_sent_again_is_on_its_way_too(tmp_path: Path) -> None:
    most = MAX_IMAGE_BYTES // BYTES

    async def scenario(talk: Talk) -> None:
        talk.submit(RED, tiles=most)
        stream = talk.submit(RED, tiles=most)
        assert [len(await talk.engine.recv_multipart()) for _ in range(2)] == [2, 1]
        await talk.ends(1)
        await talk.lacks(2)
        assert len(await asyncio.wait_for(talk.engine.recv_multipart(), 5)) == 2
        stream.close()
        assert talk.wires.client._pixels.num_bytes == 0
        with pytest.raises(Overloaded):
            talk.submit(BLUE)

    talk(tmp_path, scenario)


class Engine:
    """Keeps the pixels of its live sequences, as the scheduler does."""

    def __init__(self) -> None:
        self.live: dict[int, set[bytes]] = {}

    def takes(self, seq_id: int, keys: set[bytes], brings: set[bytes]) -> bool:
        if keys - brings - set().union(*self.live.values()):
            return False
        self.live[seq_id] = keys
        return True


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_everybody_gets_through(seed: int) -> None:
    """Messages and answers pass one another at random; nobody waits for pixels for ever, no key is sent needlessly."""
    import random

    rng = random.Random(seed)
    ledger, engine, keys = PixelLedger(10**9), Engine(), [bytes([65 + index]) * 32 for index in range(4)]
    to_engine: list[tuple[int, set[bytes]]] = []
    to_client: list[tuple[str, int]] = []
    requests: dict[int, GenerationRequest] = {}
    live: set[int] = set()
    sent = accepted = 0
    for step in range(3000):
        action = rng.choice(["submit", "engine", "engine", "finish", "client", "client"]) if step < 2000 else "drain"
        if action == "submit":
            seq_id = sent = sent + 1
            requests[seq_id] = shows(*rng.sample(keys, rng.randint(1, 3)))
            live.add(seq_id)
            ledger.add(requests[seq_id])
            to_engine.append((seq_id, ledger.first(seq_id, requests[seq_id], 0)))
        if action in ("engine", "drain") and to_engine:
            seq_id, brings = to_engine.pop(0)
            if engine.takes(seq_id, {entry.key for entry in requests[seq_id].images.images}, brings):
                accepted += 1
            else:
                to_client.append(("missing", seq_id))
        if action == "finish" and engine.live:
            seq_id = rng.choice(sorted(engine.live))
            del engine.live[seq_id]
            to_client.append(("end", seq_id))
        if action in ("client", "drain") and to_client:
            kind, seq_id = to_client.pop(0)
            if kind == "missing":
                to_engine.append((seq_id, ledger.missing(seq_id, requests[seq_id], 0)))
            else:
                ledger.remove(seq_id, requests[seq_id], 0)
                live.discard(seq_id)
    assert (to_engine, to_client, accepted) == ([], [], sent)
    assert live == engine.live.keys()
    assert ledger.num_bytes == BYTES * len(set().union(*engine.live.values()))
