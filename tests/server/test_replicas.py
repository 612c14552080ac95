"""Two engines behind one client: who gets what, and who pays when one is lost."""

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq.asyncio

from server import engine_link, wire
from server.errors import Overloaded
from server.generation import GenerationRequest, RequestStream
from server.health import progress
from server.routing import BLOCK_TOKENS
from server.total_stats import total
from tests.server.test_client import INFO, REQUEST, STATS, Wires
from tests.server.test_client_images import RED, shows
from tests.server.test_recovery import told


class Pair:
    """A client and the engines of two replicas; generations are numbered through both."""

    def __init__(self, wires: Wires) -> None:
        self.wires, self.client = wires, wires.client
        self.supervisor = wires.peer(wire.SUPERVISOR)
        self.next_generation = 0
        self.engines: dict[int, zmq.asyncio.Socket] = {}
        self.generations: dict[int, int] = {}

    async def start(self, replica: int) -> None:
        generation, self.next_generation = self.next_generation, self.next_generation + 1
        engine = self.wires.peer(wire.engine_identity(generation))
        hello = wire.Hello(
            version=wire.WIRE_VERSION, generation=generation, info=INFO, stats=self._stats(generation), replica=replica
        )
        await engine.send(wire.encode(hello))
        self.engines[replica], self.generations[replica] = engine, generation
        await self.until(lambda: self.client.replicas[replica] is not None)

    def _stats(self, generation: int, step_id: int = 0) -> wire.Stats:
        return msgspec.structs.replace(STATS, generation=generation, step_id=step_id)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)

    async def lose(self, replica: int, *, from_outside: bool = False) -> None:
        generation = self.generations[replica]
        lost = self.client.recovery.engines_lost
        await self.supervisor.send(wire.encode(wire.EngineDown(generation, "it crashed", from_outside, replica)))
        await self.until(lambda: self.client.recovery.engines_lost == lost + 1)

    def ask(self, *prompt: int, n: int = 1, request: GenerationRequest = REQUEST) -> RequestStream:
        """A prompt of blocks of these tokens."""
        ids = array("i", [token for token in prompt for _ in range(BLOCK_TOKENS)]) or request.prompt_ids
        return self.client.submit([replace(request, prompt_ids=ids, n=n)], self.client.admit())[0]

    async def hears(self, replica: int) -> wire.Submit:
        message = wire.decode_to_engine((await asyncio.wait_for(self.engines[replica].recv_multipart(), 5))[0])
        assert isinstance(message, wire.Submit), message
        return message

    async def hear_all(self, replica: int, *seq_ids: int) -> None:
        assert [(await self.hears(replica)).seq_id for _ in seq_ids] == [*seq_ids]

    async def hears_nothing(self, replica: int) -> None:
        assert not await self.engines[replica].poll(50)

    async def says(self, replica: int, *events: wire.Event) -> None:
        before = self.client.replicas[replica]
        assert before is not None
        stats = self._stats(self.generations[replica], before.step_id + 1)
        await self.engines[replica].send(wire.encode(wire.Events(list(events), stats)))
        await self.until(lambda: self.client.replicas[replica] == stats)


def with_pair(folder: Path, scenario: Callable[[Pair], Awaitable[None]], replicas: int = 2) -> None:
    async def main() -> None:
        wires = Wires(folder, replicas=replicas)
        try:
            pair = Pair(wires)
            for replica in range(replicas):
                await pair.start(replica)
            await scenario(pair)
        finally:
            await wires.close()

    asyncio.run(main())


def test_work_is_divided_and_beginnings_are_remembered(tmp_path: Path) -> None:
    """What a follow-up begins with weighs more than a little load; aborts go where the sequence is."""

    async def scenario(pair: Pair) -> None:
        streams = [pair.ask(1, 2, n=2), pair.ask(3, 4)]
        await pair.hear_all(0, 1, 2)
        await pair.hear_all(1, 3)
        follows = pair.ask(1, 2, 5)
        await pair.hear_all(0, 4)
        other = pair.ask(6)
        await pair.hear_all(1, 5)
        for stream in (*streams, follows, other):
            stream.close()
        aborts = [wire.decode_to_engine(await pair.engines[replica].recv()) for replica in (0, 1, 0, 1)]
        assert aborts == [wire.Abort([1, 2]), wire.Abort([3]), wire.Abort([4]), wire.Abort([5])]
        assert pair.client.idle

    with_pair(tmp_path, scenario)


def test_choices_of_a_request_stay_together(tmp_path: Path) -> None:
    """Also where nothing is known of the prompt, and when they go on elsewhere."""

    async def scenario(pair: Pair) -> None:
        pair.ask(n=3)
        await pair.hear_all(0, 1, 2, 3)
        await pair.lose(0, from_outside=True)
        await pair.hear_all(1, 1, 2, 3)

    with_pair(tmp_path, scenario, replicas=3)


def test_pixels_travel_once_to_each_engine(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        async def brought(replica: int) -> tuple[int, int]:
            frames = await asyncio.wait_for(pair.engines[replica].recv_multipart(), 5)
            return wire.decode_to_engine(frames[0]).seq_id, len(frames) - 1  # type: ignore[union-attr]

        ask = [pair.client.submit([shows(RED)], pair.client.admit())[0] for _ in range(4)]
        assert [await brought(replica) for replica in (0, 1, 0, 1)] == [(1, 1), (2, 1), (3, 0), (4, 0)]
        await pair.says(0, *(wire.Event(seq_id, [7], finish_reason="stop") for seq_id in (1, 3)))
        ask.append(pair.client.submit([shows(RED)], pair.client.admit())[0])
        assert await brought(0) == (5, 1), "its engine has dropped them, though others show them"
        await pair.lose(1, from_outside=True)
        assert [await brought(0) for _ in range(2)] == [(2, 0), (4, 0)]
        for stream in ask:
            stream.close()
        assert pair.client._pixels.num_bytes == 0

    with_pair(tmp_path, scenario)


def test_what_a_killed_engine_had_goes_to_the_other_at_once(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        moved, stays = pair.ask(1), pair.ask(2)
        await pair.hear_all(0, 1)
        await pair.hear_all(1, 2)
        await pair.says(0, wire.Event(1, [10, 11]))
        first = pair.engines[0]
        await pair.lose(0, from_outside=True)
        assert pair.client.unready_reason() is None
        replayed = await pair.hears(1)
        assert (replayed.seq_id, wire.unpack_ids(replayed.output_ids).tolist()) == (1, [10, 11])
        await first.send(wire.encode(wire.Events([wire.Event(1, [12])], STATS)))
        await pair.says(1, wire.Event(2, [20], finish_reason="stop"), wire.Event(1, [12], finish_reason="stop"))
        assert await told(moved) == [(0, [10, 11], None), (0, [12], "stop")]
        assert await told(stays) == [(0, [20], "stop")]
        await pair.start(0)
        pair.ask(3).close()
        await pair.hear_all(0, 3)

    with_pair(tmp_path, scenario)


def test_several_others_share_what_a_killed_engine_had(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        for _ in range(6):
            pair.ask()
        for replica in range(3):
            await pair.hear_all(replica, 1 + replica, 4 + replica)
        await pair.lose(2, from_outside=True)
        await pair.hear_all(0, 3)
        await pair.hear_all(1, 6)

    with_pair(tmp_path, scenario, replicas=3)


def test_poison_takes_one_replica_only(tmp_path: Path) -> None:
    """Sequence 1 crashes its engine. It never comes to the other one, which serves everybody else; nor do others come
    to where it is as long as it has not had a token."""

    async def scenario(pair: Pair) -> None:
        poison, stays, beside = pair.ask(1), pair.ask(2), pair.ask(3)
        await pair.hear_all(0, 1, 3)
        await pair.hear_all(1, 2)
        await pair.lose(0)
        late = pair.ask(1)
        await pair.hear_all(1, 4)
        await pair.start(0)
        await pair.hear_all(0, 1, 3)
        later = pair.ask(5)
        await pair.hear_all(1, 5)
        await pair.says(0, wire.Event(3, [30]))
        await pair.lose(0)
        await pair.hear_all(1, 3)  # it had a token between the crashes
        await pair.start(0)
        await pair.hear_all(0, 1)  # the trial
        latest = pair.ask(6)
        await pair.hear_all(1, 6)
        await pair.lose(0)
        assert await told(poison) == [(0, [], "error")]
        await pair.says(1, *(wire.Event(seq_id, [seq_id], finish_reason="stop") for seq_id in (2, 3, 4, 5, 6)))
        for stream, seq_id in ((stays, 2), (late, 4), (later, 5), (latest, 6)):
            assert await told(stream) == [(0, [seq_id], "stop")]
        assert await told(beside) == [(0, [30], None), (0, [3], "stop")]
        await pair.hears_nothing(1)
        assert pair.client.idle

    with_pair(tmp_path, scenario)


def test_innocents_of_a_crash_are_free_with_their_next_token(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        pair.ask(1)
        await pair.hear_all(0, 1)
        await pair.lose(0)
        await pair.hears_nothing(1)
        await pair.start(0)
        await pair.hear_all(0, 1)
        await pair.says(0, wire.Event(1, [10]))
        await pair.lose(0, from_outside=True)
        await pair.hear_all(1, 1)

    with_pair(tmp_path, scenario)


def test_nobody_waits_for_a_replica_that_does_not_start(tmp_path: Path) -> None:
    """Neither who is contained there, nor suspects, who are then tried beside others."""

    async def scenario(pair: Pair) -> None:
        pair.ask(1)
        pair.ask(2)
        await pair.hear_all(0, 1)
        await pair.hear_all(1, 2)
        await pair.lose(0)
        await pair.hears_nothing(1)
        pair.generations[0], pair.next_generation = 2, 3
        await pair.lose(0)
        await pair.hear_all(1, 1)
        await pair.lose(1)
        await pair.start(1)
        await pair.hear_all(1, 1)
        await pair.hears_nothing(1)  # sequence 1 was in two crashes
        await pair.says(1, wire.Event(1, [10]))
        await pair.hear_all(1, 2)

    with_pair(tmp_path, scenario)


def test_suspects_wait_for_an_engine_with_nobody_else(tmp_path: Path) -> None:
    """The other one goes on with its own, and with what comes."""

    async def scenario(pair: Pair) -> None:
        pair.ask(1)
        await pair.hear_all(0, 1)
        for _ in range(2):
            await pair.lose(0)
            pair.ask(9)
            await pair.start(0)
            await pair.hear_all(0, 1)
        await pair.hear_all(1, 2, 3)
        await pair.says(0, wire.Event(1, [10]))
        pair.ask(4)
        await pair.hear_all(0, 4)  # the trial is over

    with_pair(tmp_path, scenario)


def test_each_trial_has_an_engine_of_its_own(tmp_path: Path) -> None:
    """That of the one before serves others by now."""

    async def scenario(pair: Pair) -> None:
        suspect = pair.ask(1)
        await pair.hear_all(0, 1)
        for _ in range(2):
            await pair.lose(0)
            await pair.start(0)
            await pair.hear_all(0, 1)
        await pair.says(0, wire.Event(1, [10]))
        pair.ask(2)
        await pair.hear_all(1, 2)
        for _ in range(2):
            await pair.lose(1)
            await pair.hears_nothing(0)
            await pair.start(1)
            await pair.hear_all(1, 2)
        suspect.close()

    with_pair(tmp_path, scenario)


@pytest.mark.parametrize("replicas", [1, 2])
def test_deadlines_pass_while_a_trial_makes_others_wait(tmp_path: Path, replicas: int) -> None:
    """There is one engine, and a suspect has it for itself."""

    async def scenario(pair: Pair) -> None:
        suspect = pair.ask(1)
        await pair.hear_all(0, 1)
        if replicas == 2:
            await pair.lose(1)
        for _ in range(2):
            await pair.lose(0)
            await pair.start(0)
            await pair.hear_all(0, 1)
        admission = pair.client.admit()
        admission.deadline = time.monotonic() - 1
        (waits,) = pair.client.submit([REQUEST], admission)
        await pair.says(0)
        assert await asyncio.wait_for(told(waits), 5) == [(0, [], "timeout")]
        await pair.says(0, wire.Event(1, [10], finish_reason="stop"))
        assert await told(suspect) == [(0, [10], "stop")]

    with_pair(tmp_path, scenario, replicas)


def test_ready_as_long_as_one_is(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        await pair.lose(0)
        assert pair.client.unready_reason() is None
        assert [stats is None for stats in pair.client.replicas] == [True, False]
        await pair.lose(1)
        assert pair.client.unready_reason() == "it crashed"
        pair.ask(1)
        await pair.start(1)
        await pair.hear_all(1, 1)

    with_pair(tmp_path, scenario)


def test_who_does_not_read_gets_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "MAX_UNHEARD_BYTES", 1)

    async def scenario(pair: Pair) -> None:
        pair.ask(1)
        pair.ask(1)
        await pair.hear_all(0, 1)
        await pair.hear_all(1, 2)
        with pytest.raises(Overloaded, match="not caught up"):
            pair.client.admit()
        await pair.says(1)
        pair.ask(1)
        await pair.hear_all(1, 3)

    with_pair(tmp_path, scenario)


def test_who_is_quiet_gets_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(pair: Pair) -> None:
        await pair.says(0)
        monkeypatch.setattr(engine_link, "QUIET_SECONDS", 0.05)
        await asyncio.sleep(0.1)
        await pair.says(1)
        pair.ask(1)
        await pair.hear_all(1, 1)

    with_pair(tmp_path, scenario)


@pytest.mark.parametrize("replica", [-1, 2])
def test_a_replica_that_there_is_not(tmp_path: Path, replica: int) -> None:
    async def scenario(pair: Pair) -> None:
        stranger = pair.wires.peer(wire.engine_identity(7))
        hello = wire.Hello(version=wire.WIRE_VERSION, generation=7, info=INFO, stats=STATS, replica=replica)
        await stranger.send(wire.encode(hello))
        await pair.says(0)
        assert not pair.wires.receiving.done()
        assert [stats.generation for stats in pair.client.replicas if stats] == [0, 1]

    with_pair(tmp_path, scenario)


def test_totals() -> None:
    busy = msgspec.structs.replace(STATS, generation=3, running=2, busy=True, accepted_per_position=(1, 2))
    assert total([None, None]) is None
    assert total([None, busy]) == busy
    both = total([busy, msgspec.structs.replace(STATS, waiting=4, accepted_per_position=(5,))])
    assert both is not None
    assert (both.generation, both.running, both.waiting, both.busy) == (3, 2, 4, True)
    assert (both.total_blocks, both.accepted_per_position) == (2 * STATS.total_blocks, (6, 2))
    document = progress([busy, None])
    assert (document["running"], document["status"]) == (2, "busy")
    assert [one["status"] for one in document["replicas"]] == ["busy", "no engine"]
    assert "replicas" not in progress([busy])
