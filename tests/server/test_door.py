"""The door: who is let in, in which order, and that those without a place never wait for those who have one."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from server import door
from server.door import Door, Turns
from server.errors import Unavailable
from server.middleware import RequestRecord
from tests.server.exchange import run
from tests.server.fakes import FakeEngine

PATH = "/generate"


class Visits:
    """An application behind a door, and what happened in order."""

    def __init__(self, engine: FakeEngine) -> None:
        self.log: list[str] = []
        self.door = Door(self._app, engine, {PATH})

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.log.append(f"in {scope['name']} {'admission' in scope['state']}")
        if scope["name"] == "broken":
            raise RuntimeError("a fault")

    async def visit(self, name: str, method: str = "POST", path: str = PATH) -> None:
        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.log.append(f"{message['status']} {name}")

        async def receive() -> MutableMapping[str, Any]:
            raise AssertionError("the door does not read bodies")

        state = {"record": RequestRecord(request_id=name)}
        await self.door({"type": "http", "method": method, "path": path, "state": state, "name": name}, receive, send)


def test_only_generation_takes_a_place() -> None:
    visits = Visits(FakeEngine(places=0))
    run(visits.visit("probe", "GET"))
    run(visits.visit("other", path="/tokenize"))
    run(visits.visit("turned away"))
    assert visits.log == ["in probe False", "in other False", "429 turned away"]


def test_unready_engine() -> None:
    visits = Visits(FakeEngine(unready=Unavailable("loading")))
    run(visits.visit("early"))
    assert visits.log == ["503 early"]


def test_place_is_given_back_also_after_a_fault() -> None:
    engine = FakeEngine(places=1)
    visits = Visits(engine)
    with pytest.raises(RuntimeError):
        run(visits.visit("broken"))
    run(visits.visit("next"))
    assert visits.log == ["in broken True", "in next True"]
    assert engine.reserved == 0


def test_refusals_overtake_the_admitted() -> None:
    visits = Visits(FakeEngine(places=3))

    async def burst() -> None:
        await asyncio.gather(*(visits.visit(str(index)) for index in range(8)))

    run(burst())
    assert visits.log == [*(f"429 {index}" for index in range(3, 8)), *(f"in {index} True" for index in range(3))]


def test_one_turn_in_each_pass() -> None:
    async def passes() -> list[int]:
        turns, now, taken = Turns(), 0, []

        async def visitor() -> None:
            await turns.take()
            taken.append(now)

        visitors = [asyncio.create_task(visitor()) for _ in range(5)]
        while len(taken) < 5:
            await asyncio.sleep(0)
            now += 1
        await asyncio.gather(*visitors)
        return taken

    taken = run(passes())
    assert taken == list(range(taken[0], taken[0] + 5))


def test_turns_do_not_wait_for_ever_behind_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_WAIT", 0.02)

    async def crowd() -> int:
        turns = Turns()
        visitor = asyncio.create_task(turns.take())
        arrivals = 0
        while not visitor.done():
            turns.arrive()
            arrivals += 1
            await asyncio.sleep(0)
        return arrivals

    assert run(crowd()) > 3


def test_cancelled_visitors_lose_their_turn() -> None:
    async def leave() -> None:
        turns = Turns()
        first, second = (asyncio.create_task(turns.take()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait_for(second, 5)
        assert first.cancelled() or first.cancelling()

    run(leave())
