"""Memory that runs out: what is looked at, who is refused, and what the engine does about it."""

import asyncio
from pathlib import Path
from typing import cast

import pytest
import zmq

from model_runtime.executor import Executor
from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan
from scheduler.scheduler import Scheduler
from server.engine import EngineLoop
from server.errors import Overloaded
from server.grammar.matchers import Matchers
from server.memory_guard import MemoryGuard
from tests.scheduler.driving import answer
from tests.server.test_client import Wires, run

MIB = 2**20


class Machine:
    """Memory that a test decides."""

    def __init__(self, available: int) -> None:
        self.available, self.now, self.looks = available, 0.0, 0

    def read(self) -> int:
        self.looks += 1
        return self.available

    def guard(self, min_free: int) -> MemoryGuard:
        return MemoryGuard(min_free, self.read, lambda: self.now)


def test_scarce_comes_before_short() -> None:
    machine = Machine(2 * MIB)
    guard = machine.guard(MIB)
    guard.require()
    assert not guard.is_scarce
    for available, scarce in ((2 * MIB, False), (2 * MIB - 1, True), (MIB, True)):
        machine.available, machine.now = available, machine.now + 1
        assert guard.look()
        assert guard.is_scarce is scarce
        guard.require()
    machine.available, machine.now = MIB - 1, machine.now + 1
    guard.look()
    with pytest.raises(Overloaded, match="0 MiB of memory left, and min_free_memory is 1 MiB"):
        guard.require()


def test_the_system_is_asked_twice_a_second() -> None:
    machine = Machine(0)
    guard = machine.guard(1)
    asked = []
    for tenth in range(12):
        machine.now = tenth / 10
        asked.append(guard.look())
    assert machine.looks == sum(asked) == 3
    off = machine.guard(0)
    assert not off.look()
    off.require()


def test_who_comes_while_memory_is_short_is_refused(tmp_path: Path) -> None:
    """Those who were let in go on."""

    async def scenario(wires: Wires) -> None:
        machine = Machine(MIB)
        guard = machine.guard(MIB)
        wires.client.require_memory = guard.require
        await wires.greet(0)
        await wires.ready(True)
        guard.look()
        admitted = wires.client.admit()
        machine.available, machine.now = MIB - 1, 1.0
        guard.look()
        with pytest.raises(Overloaded):
            wires.client.admit()
        assert wires.client.is_full
        admitted.release()
        machine.available, machine.now = MIB, 2.0
        guard.look()
        wires.client.admit().release()
        await asyncio.sleep(0)

    run(tmp_path, scenario)


class Listener:
    """An executor that keeps its plans."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> object:
        self.plans.append(plan)
        return answer(plan)


def test_an_idle_engine_gives_memory_back() -> None:
    machine, executor = Machine(2 * MIB), Listener()
    scheduler = Scheduler(SchedulerConfig(), num_blocks=8, max_model_len=64)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        guard = machine.guard(MIB)
        loop = EngineLoop(
            socket, scheduler, cast(Executor, executor), cast(Matchers, None), 0, guard, on_pass=lambda: None
        )
        loop._relieve_memory()
        machine.available, machine.now = MIB, 1.0
        loop._relieve_memory()
        loop._relieve_memory()
    (plan,) = executor.plans
    assert sorted(plan.free_blocks) == list(range(8))
