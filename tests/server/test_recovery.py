"""Engines that are lost: who starts again where, who is tried alone, who is guilty, and what waits meanwhile."""

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq.asyncio

from scheduler.request import OutputGrammar, SamplingParams
from server import quarantine, wire
from server.errors import BadRequest
from server.generation import GenerationRequest, RequestStream
from server.quarantine import MAX_QUARANTINED, Quarantine
from tests.server.test_client import REQUEST, STATS, Wires, run


class Engines:
    """A client, and one engine after the other."""

    def __init__(self, wires: Wires) -> None:
        self.wires, self.client = wires, wires.client
        self.supervisor = wires.peer(wire.SUPERVISOR)
        self.generation = -1
        self.engine: zmq.asyncio.Socket

    async def start(self) -> None:
        self.generation += 1
        self.engine = await self.wires.greet(self.generation)
        await self.wires.ready(True)

    async def crash(self, *, from_outside: bool = False) -> None:
        """The engine ends, and the next one starts."""
        await self.supervisor.send(wire.encode(wire.EngineDown(self.generation, "it crashed", from_outside)))
        await self.wires.ready(False)
        await self.start()

    def ask(self, *prompt: int, n: int = 1, deadline: float | None = None) -> RequestStream:
        admission = self.client.admit()
        if deadline is not None:
            admission.deadline = deadline
        try:
            return self.client.submit([replace(REQUEST, prompt_ids=array("i", prompt or [1, 2]), n=n)], admission)[0]
        finally:
            admission.release()

    async def hears(self) -> tuple[int, list[int]]:
        """(seq_id, outputs) of the next sequence that the engine is given."""
        message = wire.decode_to_engine(await asyncio.wait_for(self.engine.recv(), 5))
        assert isinstance(message, wire.Submit), message
        return message.seq_id, wire.unpack_ids(message.output_ids).tolist()

    async def hears_nothing(self) -> None:
        await self.says()
        assert not await self.engine.poll(50)

    async def says(self, *events: wire.Event) -> None:
        stats = next_stats(self.client.stats)
        await self.engine.send(wire.encode(wire.Events(list(events), stats)))
        await self.wires.heard(stats)


def next_stats(stats: wire.Stats | None) -> wire.Stats:
    return msgspec.structs.replace(STATS, step_id=1 + (stats.step_id if stats else 0))


def with_engines(folder: Path, scenario: Callable[[Engines], Awaitable[None]]) -> None:
    async def main(wires: Wires) -> None:
        engines = Engines(wires)
        await engines.start()
        await scenario(engines)

    run(folder, main)


async def told(stream: RequestStream) -> list[tuple[int, list[int], str | None]]:
    return [(choice, event.token_ids, event.finish_reason) async for choice, event in stream.events()]


def test_sequences_go_on_where_they_stood(tmp_path: Path) -> None:
    """No token twice and none lost; those that ended are not started again; who came meanwhile is started too."""

    async def scenario(engines: Engines) -> None:
        stream, ended = engines.ask(n=2), engines.ask(7)
        assert [await engines.hears() for _ in range(3)] == [(1, []), (2, []), (3, [])]
        await engines.says(wire.Event(1, [10, 11]), wire.Event(3, [5], finish_reason="stop"), wire.Event(2, [20]))
        await engines.says(wire.Event(1, [12]))
        await engines.supervisor.send(wire.encode(wire.EngineDown(0, "it crashed")))
        await engines.wires.ready(False)
        late = engines.ask(8)
        await engines.start()
        assert [await engines.hears() for _ in range(3)] == [(1, [10, 11, 12]), (2, [20]), (4, [])]
        await engines.says(wire.Event(1, [13], finish_reason="length"), wire.Event(2, [21], finish_reason="stop"))
        await engines.says(wire.Event(4, [9], finish_reason="stop"))
        assert await told(stream) == [
            (0, [10, 11], None),
            (1, [20], None),
            (0, [12], None),
            (0, [13], "length"),
            (1, [21], "stop"),
        ]
        assert await told(ended) == [(0, [5], "stop")]
        assert await told(late) == [(0, [9], "stop")]
        assert engines.client.idle
        recovery = engines.client.recovery
        assert (recovery.engines_lost, recovery.sequences_replayed, recovery.sequences_resumed) == (1, 2, 2)
        assert 0 < recovery.pause_seconds < 20

    with_engines(tmp_path, scenario)


def test_pooled_sequences_begin_again(tmp_path: Path) -> None:
    """They have nothing that a new engine could go on from, and prove their innocence when they end."""

    async def scenario(engines: Engines) -> None:
        request, other = replace(REQUEST, pooling="mean"), replace(REQUEST, prompt_ids=array("i", [3]))
        pooled, other_stream = engines.client.submit([request, other], engines.client.admit())
        await engines.crash()
        await engines.crash()
        first = wire.decode_to_engine(await asyncio.wait_for(engines.engine.recv(), 5))
        assert isinstance(first, wire.Submit)
        assert (first.pooling, first.prompt_ids, first.output_ids) == ("mean", request.prompt_ids.tobytes(), b"")
        await engines.hears_nothing()
        await engines.says(wire.Event(1, finish_reason="stop", pooled=b"12345678"))
        assert [event.pooled async for _, event in pooled.events()] == [b"12345678"]
        assert await engines.hears() == (2, [])
        assert engines.client.recovery.sequences_resumed == 1
        other_stream.close()

    with_engines(tmp_path, scenario)


def test_the_last_tokens_of_a_lost_engine_are_not_taken(tmp_path: Path) -> None:
    """They come by another way than the word that it is gone, and the next engine makes them again."""

    async def scenario(engines: Engines) -> None:
        stream = engines.ask()
        await engines.hears()
        first = engines.engine
        await engines.crash()
        await first.send(wire.encode(wire.Events([wire.Event(1, [10])], STATS)))
        assert await engines.hears() == (1, [])
        await engines.says(wire.Event(1, [10], finish_reason="stop"))
        assert await told(stream) == [(0, [10], "stop")]

    with_engines(tmp_path, scenario)


def test_aborted_while_there_is_no_engine(tmp_path: Path) -> None:
    async def scenario(engines: Engines) -> None:
        gone, stays = engines.ask(), engines.ask()
        await engines.supervisor.send(wire.encode(wire.EngineDown(0, "it crashed")))
        await engines.wires.ready(False)
        gone.close()
        await engines.start()
        assert await engines.hears() == (2, [])
        stays.close()
        assert engines.client.idle

    with_engines(tmp_path, scenario)


def test_deadlines_pass_without_an_engine(tmp_path: Path) -> None:
    async def scenario(engines: Engines) -> None:
        stream = engines.ask(deadline=time.monotonic() + 0.2)
        await engines.supervisor.send(wire.encode(wire.EngineDown(0, "it crashed")))
        assert await asyncio.wait_for(told(stream), 5) == [(0, [], "timeout")]
        assert engines.client.idle

    with_engines(tmp_path, scenario)


def test_what_crashes_engines_fails_alone(tmp_path: Path) -> None:
    """Sequence 2 does. Two crashes without a token make suspects of all; 1 proves innocent; 2 does not, and 3, which
    waited, and 4, which came during the trial, go on as ever."""

    async def scenario(engines: Engines) -> None:
        streams = [engines.ask(1), engines.ask(2, 2), engines.ask(3)]
        assert [await engines.hears() for _ in range(3)] == [(1, []), (2, []), (3, [])]
        await engines.says(wire.Event(1, [10]))
        await engines.crash()
        assert [await engines.hears() for _ in range(3)] == [(1, [10]), (2, []), (3, [])]
        await engines.crash()
        assert await engines.hears() == (1, [10])
        streams.append(engines.ask(4))
        await engines.hears_nothing()
        await engines.says(wire.Event(1, [11]))
        assert await engines.hears() == (2, [])
        await engines.hears_nothing()
        await engines.crash()
        assert [await engines.hears() for _ in range(3)] == [(1, [10, 11]), (3, []), (4, [])]
        assert await told(streams[1]) == [(0, [], "error")]
        with pytest.raises(BadRequest, match="has repeatedly made the engine crash"):
            engines.ask(2, 2)
        ends = [wire.Event(seq_id, [seq_id], finish_reason="stop") for seq_id in (1, 3, 4)]
        await engines.says(*ends)
        assert [await told(streams[index]) for index in (0, 2, 3)] == [
            [(0, [10], None), (0, [11], None), (0, [1], "stop")],
            [(0, [3], "stop")],
            [(0, [4], "stop")],
        ]
        assert engines.client.idle
        assert engines.client.recovery.sequences_quarantined == 1

    with_engines(tmp_path, scenario)


def test_crashes_between_which_there_were_tokens_prove_nothing(tmp_path: Path) -> None:
    async def scenario(engines: Engines) -> None:
        stream = engines.ask()
        for count in range(6):
            assert await engines.hears() == (1, [7] * count)
            await engines.says(wire.Event(1, [7]))
            await engines.crash()
        stream.close()

    with_engines(tmp_path, scenario)


def test_what_may_come_from_outside_is_weak_evidence(tmp_path: Path) -> None:
    """It may be want of memory, which a request may cause: after three in its trial it is guilty all the same."""

    async def scenario(engines: Engines) -> None:
        stream = engines.ask()
        for _ in range(5):
            assert await engines.hears() == (1, [])
            await engines.crash(from_outside=True)
        assert await told(stream) == [(0, [], "error")]

    with_engines(tmp_path, scenario)


def test_a_trial_ends_when_the_suspect_goes(tmp_path: Path) -> None:
    async def scenario(engines: Engines) -> None:
        gone, stays = engines.ask(1), engines.ask(2)
        for _ in range(2):
            assert [await engines.hears() for _ in range(2)] == [(1, []), (2, [])]
            await engines.crash()
        assert await engines.hears() == (1, [])
        gone.close()
        assert wire.decode_to_engine(await engines.engine.recv()) == wire.Abort([1])
        assert await engines.hears() == (2, [])
        stays.close()

    with_engines(tmp_path, scenario)


def asks(*prompt: int, grammar: str = "") -> GenerationRequest:
    sampling = SamplingParams(max_tokens=1, grammar=OutputGrammar(source=grammar) if grammar else None)
    return replace(REQUEST, prompt_ids=array("i", prompt), sampling=sampling)


def test_quarantine_is_bounded_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Quarantine()
    for number in range(MAX_QUARANTINED + 1):
        table.add(asks(number))
    table.refuse([asks(0), asks(1, 1), asks(1, grammar="other")])
    for number in (1, MAX_QUARANTINED):
        with pytest.raises(BadRequest) as refused:
            table.refuse([asks(0), asks(number)])
        assert refused.value.code == "request_quarantined"
    monkeypatch.setattr(quarantine, "QUARANTINE_SECONDS", 0.0)
    table.add(asks(1))
    later = time.monotonic() + 1000
    monkeypatch.setattr(quarantine.time, "monotonic", lambda: later)
    table.refuse([asks(1), asks(MAX_QUARANTINED)])
