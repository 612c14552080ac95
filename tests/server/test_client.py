"""The client's socket: who is heard, and what becomes of requests when the engine or the server ends."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from model_runtime.config import RuntimeInfo
from scheduler.config import SchedulerConfig
from scheduler.request import SamplingParams
from server import engine_link, wire
from server.client import EngineClient
from server.engine_socket import bind
from server.errors import Overloaded, Unavailable
from server.generation import GenerationRequest
from server.memory_guard import MemoryGuard

STATS = wire.Stats(
    generation=0,
    step_id=0,
    last_step_time=0.0,
    busy=False,
    running=0,
    waiting=0,
    free_blocks=8,
    cached_blocks=0,
    total_blocks=8,
    preemptions=0,
    prefix_queries=0,
    prefix_hits=0,
    prompt_tokens=0,
    generation_tokens=0,
)
NEXT_STATS = msgspec.structs.replace(STATS, step_id=1)
INFO = RuntimeInfo(
    max_model_len=64,
    vocab_size=100,
    hidden_size=4,
    eos_token_ids=(0,),
    num_blocks=8,
    block_size=16,
    weight_bytes=1,
    kv_bytes=1,
    max_num_batched_tokens=64,
    description="none",
)
MAX_UNREAD = 6
MAX_IMAGE_BYTES = 1000
REQUEST = GenerationRequest(prompt_ids=array("i", [1, 2]), sampling=SamplingParams(max_tokens=4))


class Wires:
    """A client that receives, and sockets of whoever wants to talk to it."""

    def __init__(self, folder: Path, replicas: int = 1) -> None:
        self._context = zmq.asyncio.Context()
        self._address = f"ipc://{folder}/s"
        router = bind(self._context, self._address)
        self._sockets = [router]
        self.client = EngineClient(
            router,
            SchedulerConfig(),
            replicas=replicas,
            max_unread_events=MAX_UNREAD,
            max_queued_image_bytes=MAX_IMAGE_BYTES,
            stall_timeout=60,
            memory=MemoryGuard(0),
            url="",
            on_drain=lambda timeout: None,
        )
        self.receiving = asyncio.get_running_loop().create_task(self.client.run())

    def peer(self, identity: bytes) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        self._sockets.append(socket)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(self._address)
        return socket

    async def greet(self, generation: int, identity: bytes | None = None) -> zmq.asyncio.Socket:
        """The socket of an engine that said that it is ready."""
        engine = self.peer(identity or wire.engine_identity(generation))
        hello = wire.Hello(version=wire.WIRE_VERSION, generation=generation, info=INFO, stats=STATS)
        await engine.send(wire.encode(hello))
        return engine

    async def ready(self, wanted: bool) -> None:
        async with asyncio.timeout(5):
            while (self.client.unready_reason() is None) is not wanted:
                await asyncio.sleep(0.005)

    async def heard(self, stats: wire.Stats) -> None:
        """The client has read what an engine sent with these."""
        async with asyncio.timeout(5):
            while self.client.stats != stats:
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        self.receiving.cancel()
        await asyncio.gather(self.receiving, return_exceptions=True)
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


def run(folder: Path, scenario: Callable[[Wires], Awaitable[None]]) -> None:
    async def main() -> None:
        wires = Wires(folder)
        try:
            await scenario(wires)
        finally:
            await wires.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "frames", [[b""], [b"\xc1"], [b"\x81\xa4type\xa5hello"], [b"a", b"b", b"c"], [b"\x00" * 70000]]
)
@pytest.mark.parametrize("identity", [b"somebody", b"engine-7"])
def test_nonsense_of_strangers_changes_nothing(tmp_path: Path, frames: list[bytes], identity: bytes) -> None:
    async def scenario(wires: Wires) -> None:
        await wires.peer(identity).send_multipart(frames)
        await wires.greet(0)
        await wires.ready(True)
        assert not wires.receiving.done()

    run(tmp_path, scenario)


@pytest.mark.parametrize("identity", [b"somebody", b"engine-1", b"supervisor-2"])
def test_a_stranger_is_not_believed(tmp_path: Path, identity: bytes) -> None:
    """Neither that it is an engine, nor that there is none."""

    async def scenario(wires: Wires) -> None:
        stranger = await wires.greet(0, identity)
        await asyncio.sleep(0.1)
        assert wires.client.unready_reason() is not None
        await wires.greet(0)
        await wires.ready(True)
        for message in (wire.EngineDown(0, "so I say"), wire.Drain(0.0), msgspec.structs.replace(STATS, step_id=99)):
            await stranger.send(wire.encode(message))
        await asyncio.sleep(0.1)
        assert wires.client.unready_reason() is None
        assert wires.client.stats == STATS

    run(tmp_path, scenario)


def test_an_engine_that_talks_nonsense_is_to_be_replaced(tmp_path: Path) -> None:
    async def scenario(wires: Wires) -> None:
        supervisor, engine = wires.peer(wire.SUPERVISOR), await wires.greet(0)
        await wires.ready(True)
        await supervisor.send(wire.encode(wire.Watch()))
        await engine.send(b"\xc1")
        await wires.ready(False)
        told = [wire.decode_to_supervisor(await asyncio.wait_for(supervisor.recv(), 5)) for _ in range(3)]
        assert isinstance(told[2], wire.Broken)
        assert told[2].generation == 0
        await engine.send(wire.encode(wire.Loading(0, "again", 0.0)))
        await wires.greet(1)
        await wires.ready(True)

    run(tmp_path, scenario)


def test_nonsense_of_the_supervisor_is_a_fault(tmp_path: Path) -> None:
    async def scenario(wires: Wires) -> None:
        await wires.peer(wire.SUPERVISOR).send(b"\xc1")
        with pytest.raises(wire.WireError):
            await asyncio.wait_for(wires.receiving, 5)

    run(tmp_path, scenario)


def test_the_last_words_of_a_dead_engine_are_not_believed(tmp_path: Path) -> None:
    """Its greeting may come after the supervisor's word that it is gone: they come by different ways."""

    async def scenario(wires: Wires) -> None:
        await wires.peer(wire.SUPERVISOR).send(wire.encode(wire.EngineDown(0, "killed")))
        await asyncio.sleep(0.1)
        await wires.greet(0)
        await asyncio.sleep(0.1)
        assert wires.client.unready_reason() is not None
        await wires.greet(1)
        await wires.ready(True)

    run(tmp_path, scenario)


@pytest.mark.parametrize("n", [1, 3])
def test_shutting_down_ends_every_choice(tmp_path: Path, n: int) -> None:
    async def scenario(wires: Wires) -> None:
        await wires.greet(0)
        await wires.ready(True)
        (stream,) = wires.client.submit([replace(REQUEST, n=n)], wires.client.admit())
        wires.client.shut_down()
        events = [event async for _, event in stream.events()]
        assert {event.message for event in events} == {"the server is shutting down"}
        assert len(events) == n
        assert wires.client.idle
        with pytest.raises(Unavailable):
            wires.client.admit()

    run(tmp_path, scenario)


@pytest.mark.parametrize("unread", [MAX_UNREAD, MAX_UNREAD + 1])
def test_who_reads_too_slowly_is_cut_off(tmp_path: Path, unread: int) -> None:
    """All choices together, with one error instead of what was left unread; the engine is told to stop."""

    async def scenario(wires: Wires) -> None:
        engine = await wires.greet(0)
        await wires.ready(True)
        (stream,) = wires.client.submit([replace(REQUEST, n=2)], wires.client.admit())
        seq_ids = [wire.decode_to_engine(await engine.recv()).seq_id for _ in range(2)]
        told = [wire.Event(seq_ids[index % 2], [index]) for index in range(unread)]
        await engine.send(wire.encode(wire.Events(told, NEXT_STATS)))
        await wires.heard(NEXT_STATS)
        events = stream.events()
        if unread <= MAX_UNREAD:
            assert [(await anext(events))[1] for _ in told] == told
            return
        (left,) = [event async for _, event in events]
        assert (left.finish_reason, left.message) == ("error", "the response was not read fast enough")
        assert wire.decode_to_engine(await engine.recv()) == wire.Abort(seq_ids)
        assert wires.client.idle

    run(tmp_path, scenario)


def test_an_engine_that_is_slow_to_read_loses_nothing(tmp_path: Path) -> None:
    """More messages than a socket queues by itself, while the engine is in a long step."""

    async def scenario(wires: Wires) -> None:
        engine = await wires.greet(0)
        await wires.peer(wire.SUPERVISOR).send(wire.encode(wire.Watch()))
        await wires.ready(True)
        for _ in range(3000):
            wires.client.submit([REQUEST], wires.client.admit())[0].close()
        await asyncio.sleep(0.1)
        assert wires.client.unready_reason() is None
        submitted = []
        for number in range(6000):
            message = wire.decode_to_engine(await asyncio.wait_for(engine.recv(), 5))
            assert isinstance(message, wire.Abort if number % 2 else wire.Submit)
            submitted += [message.seq_id] if isinstance(message, wire.Submit) else []
        assert submitted == list(range(1, 3001))

    run(tmp_path, scenario)


def test_what_an_engine_has_not_read_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "MAX_UNHEARD_BYTES", 1)

    async def scenario(wires: Wires) -> None:
        engine = await wires.greet(0)
        await wires.ready(True)
        wires.client.submit([REQUEST], wires.client.admit())[0].close()
        with pytest.raises(Overloaded, match="not caught up"):
            wires.client.admit()
        await engine.send(wire.encode(NEXT_STATS))
        await wires.heard(NEXT_STATS)
        wires.client.admit().release()

    run(tmp_path, scenario)
