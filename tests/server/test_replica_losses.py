"""Several engines behind one client: who pays when one is lost."""

import asyncio
import time
from pathlib import Path

import pytest

from server import wire
from tests.server.replica_pair import Pair, with_pair
from tests.server.test_client import REQUEST, STATS
from tests.server.test_recovery import told


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
