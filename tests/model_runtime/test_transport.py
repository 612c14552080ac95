"""Rank 0 and its followers: readiness, plans in order, reports; nonsense and gaps are typed errors."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from model_runtime import transport
from model_runtime.group import local_place
from model_runtime.layout import Layout
from model_runtime.memory.budget import PlanError
from model_runtime.plan_frames import FrameError, encode
from model_runtime.rank_stats import RankStats
from model_runtime.transport import Endpoints, Followers, Leader, LeaderLost, PoolFacts, Silence, StepEnd
from scheduler.plan import StepPlan
from tests.model_runtime.test_plan_frames import differences, full_plan

WAIT_MS = 20_000


@pytest.fixture
def endpoints(tmp_path: Path) -> Endpoints:
    return local_place(Layout(tensor_size=3), tmp_path, 0, 0).endpoints


@pytest.fixture
def both(endpoints: Endpoints) -> Iterator[tuple[Followers, list[Leader]]]:
    """Rank 0 and two followers that have agreed."""
    followers, leaders = Followers(endpoints, 0.3), [Leader(endpoints, rank) for rank in (1, 2)]
    facts = [PoolFacts(9, 80, 7000), PoolFacts(8, 90, 6000), PoolFacts(10, 70, 0)]
    with ThreadPoolExecutor() as pool:
        agreed = [
            pool.submit(side.agree, own, lambda: None) for side, own in zip((followers, *leaders), facts, strict=True)
        ]
        assert [result.result(20) for result in agreed] == [PoolFacts(8, 70, 6000)] * 3
    yield followers, leaders
    for side in (followers, *leaders):
        side.close()


def test_who_knows_no_images_gets_none(both: tuple[Followers, list[Leader]]) -> None:
    followers, leaders = both
    plan = full_plan()
    followers.send(plan, blind=[2])
    seen, blind = (leader.receive(WAIT_MS) for leader in leaders)
    assert isinstance(seen, StepPlan) and isinstance(blind, StepPlan)
    assert len(seen.encode.pixels) == len(plan.encode.pixels) > 0
    assert len(blind.encode.pixels) == len(blind.encode.slots) == 0
    assert (blind.token_ids, blind.images) == (plan.token_ids, plan.images)


def test_the_end_of_a_step_comes_in_its_place(both: tuple[Followers, list[Leader]]) -> None:
    followers, leaders = both
    followers.send(full_plan())
    followers.send_end([1])
    followers.send(full_plan())
    kinds = [
        [type(leader.receive(WAIT_MS)) for _ in range(count)] for leader, count in zip(leaders, (3, 2), strict=True)
    ]
    assert kinds == [[StepPlan, StepEnd, StepPlan], [StepPlan, StepPlan]]


def test_plans_come_to_every_follower_in_order(both: tuple[Followers, list[Leader]]) -> None:
    followers, leaders = both
    plans = [replace(full_plan(), step_id=step) for step in range(5, 9)]
    for plan in plans:
        followers.send(plan)
    for leader in leaders:
        received = [leader.receive(WAIT_MS) for _ in plans]
        assert [plan.step_id for plan in received if plan] == [5, 6, 7, 8]
        assert received[0] is not None and bytes(received[0].encode.pixels[1].data) == bytes(range(24))
        assert ("token_ids",) not in differences(plans[0], received[0])
        assert leader.receive(0) is None


def test_reports_come_to_rank_0(both: tuple[Followers, list[Leader]]) -> None:
    followers, leaders = both
    sent = [
        RankStats(
            rank=rank,
            steps=7 + rank,
            step_seconds=1.5,
            collectives=3,
            sent_bytes=4,
            collective_seconds=0.5,
            waiting_seconds=0.25,
            expert_tokens=9,
        )
        for rank in (1, 2)
    ]
    for leader, message in zip(leaders, sent, strict=True):
        leader.report(message)
    for _ in range(400):
        followers.wait_for_reports(50)
        if len(followers.stats) == 2:
            break
    assert followers.stats == {1: sent[0], 2: sent[1]}


@pytest.mark.parametrize("numbers", [(0, 1, 3), (0, 0), (1,)])
def test_a_gap_and_a_repeated_plan_are_refused(endpoints: Endpoints, numbers: tuple[int, ...]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.PUSH) as push:
        push.bind(endpoints.plans[0])
        leader = Leader(endpoints, 1)
        for number in numbers:
            push.send_multipart(encode(full_plan(), number))
        for _ in numbers[:-1]:
            assert leader.receive(WAIT_MS) is not None
        with pytest.raises(FrameError, match=f"plan {numbers[-1]} comes as number {len(numbers) - 1}"):
            leader.receive(WAIT_MS)
        leader.close()


def test_nonsense_is_a_typed_error(endpoints: Endpoints) -> None:
    followers = Followers(endpoints, 0.3)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.PUSH) as push:
        push.connect(endpoints.reports)
        for frame in (
            b"",
            b"\x00\xff",
            b"\x93\xa5ready\x03\x93\x01\x02\x03",
        ):  # the last is of a rank 3, and there is none
            push.send(frame)
            with pytest.raises(FrameError):
                followers.agree(PoolFacts(1, 1, 0), lambda: None)
    followers.close()


def test_a_rank_that_would_compute_something_else_is_refused(endpoints: Endpoints) -> None:
    followers, leader = Followers(endpoints, 0.3), Leader(endpoints, 1)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(leader.agree, PoolFacts(1, 1, 0, "int8"), lambda: None)
        with pytest.raises(PlanError, match="rank 1 has another model, version or options than rank 0"):
            followers.agree(PoolFacts(1, 1, 0, "float16"), lambda: None)
        with pytest.raises(PlanError, match="this rank has another model, version or options than rank 0"):
            joining.result(20)
    leader.close()


def test_waiting_for_ranks_can_be_ended(endpoints: Endpoints) -> None:
    def wait() -> None:
        raise KeyboardInterrupt

    followers, leader = Followers(endpoints, 0.3), Leader(endpoints, 1)
    for side in (leader, followers):
        with pytest.raises(KeyboardInterrupt):
            side.agree(PoolFacts(1, 1, 0), wait)
        side.close()


def wait_for_loss(leader: Leader) -> None:
    for _ in range(200):
        leader.receive(100)


def test_the_end_of_rank_0_is_noticed(both: tuple[Followers, list[Leader]]) -> None:
    followers, leaders = both
    followers.close()

    with pytest.raises(LeaderLost):
        wait_for_loss(leaders[0])


def test_rank_0_is_missed_where_its_machine_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, so that no connection ends."""
    monkeypatch.setattr(transport, "HEARTBEAT_MS", 20)
    script = (
        "import time, zmq; socket = zmq.Context().socket(zmq.PUSH); "
        "print(socket.bind_to_random_port('tcp://127.0.0.1'), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as silent:
        assert silent.stdout is not None
        port = int(silent.stdout.readline())
        leader = Leader(Endpoints(plans=(f"tcp://127.0.0.1:{port}",), reports="tcp://127.0.0.1:9"), 1)
        for _ in range(20):  # heartbeats are answered
            assert leader.receive(10) is None
        silent.send_signal(signal.SIGSTOP)
        with pytest.raises(LeaderLost):
            wait_for_loss(leader)
        leader.close()
        silent.kill()


def test_a_follower_that_does_not_report_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only time in which rank 0 looks counts: after a long step the reports may still be on their way."""
    clock = [100.0]
    monkeypatch.setattr(transport.time, "monotonic", lambda: clock[0])
    silence = Silence((1, 2), 10.0)
    for _ in range(20):
        clock[0] += 7.0
        silence.heard(2)
        silence.check()
    clock[0] += 0.1
    with pytest.raises(AssertionError, match="rank 1 was silent for 10 s"):
        silence.check()


def test_a_follower_that_does_not_read_is_an_assertion(endpoints: Endpoints) -> None:
    followers = Followers(endpoints, 0.1)
    with pytest.raises(AssertionError, match="rank 1 does not read its plans"):
        followers.send(full_plan())
    followers.close()
