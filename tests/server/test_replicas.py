"""Several engines behind one client: who gets what, and what of them is seen."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from server import engine_link, wire
from server.errors import Overloaded
from server.health import progress
from server.total_stats import total
from tests.server.replica_pair import Pair, with_pair
from tests.server.test_client import INFO, STATS
from tests.server.test_client_images import RED, shows


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
        monkeypatch.setattr(engine_link, "QUIET_SECONDS", 0.5)
        await asyncio.sleep(0.6)
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
