"""A client with the engines of several replicas, which tests speak for."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq.asyncio

from server import wire
from server.generation import GenerationRequest, RequestStream
from server.routing import BLOCK_TOKENS
from tests.server.test_client import INFO, REQUEST, STATS, Wires


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
