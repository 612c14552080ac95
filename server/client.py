"""The engines as the gateway sees them: admission, submit, abort, and a `ClientStream` of events for each request.

Routes use it through the protocols of `server/generation.py`; `server/api_process.py` runs its receive loop. When an
engine is lost, its requests go to others or wait here for the next one, which goes on with them (`replay.py`,
`dispatch.py`).
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable

import zmq.asyncio

from model_runtime.config import RuntimeInfo
from scheduler.config import SchedulerConfig
from scheduler.request import FinishReason, PixelsMissing
from server import generation, wire
from server.admissions import Admission, Admissions
from server.client_pixels import PixelLedger
from server.client_stream import ClientStream
from server.dispatch import Dispatcher
from server.engine_link import EngineLink
from server.engine_links import EngineLinks
from server.engine_socket import EngineSocket
from server.errors import Overloaded, Unavailable
from server.generation import GenerationRequest, RecoveryStats
from server.memory_guard import MemoryGuard
from server.quarantine import Quarantine
from server.replay import Live, LiveSequences
from server.total_stats import total
from server.wire_submit import submits_of, with_images

logger = logging.getLogger(__name__)

EXPIRY_POLL_MS = 250
"""How often deadlines are looked at while an engine is missing."""
HEALTH_SECONDS = 0.25


class EngineClient:
    """Implements `server.generation.Engine` over a bound ROUTER socket."""

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        config: SchedulerConfig,
        *,
        replicas: int = 1,
        max_unread_events: int,
        max_queued_image_bytes: int,
        stall_timeout: float,
        memory: MemoryGuard,
        url: str,
        on_drain: Callable[[float], None],
    ) -> None:
        self._socket = EngineSocket(socket)
        self._links = EngineLinks(self._socket, replicas, stall_timeout)
        self._max_unread_events = max_unread_events
        self.require_memory = memory.require
        self._url, self._on_drain = url, on_drain
        self._watched = False
        self._sequences = LiveSequences()
        self._dispatcher = Dispatcher(self._sequences, by_prefix=config.enable_prefix_caching and replicas > 1)
        self._quarantine = Quarantine()
        self._pixels = PixelLedger(max_queued_image_bytes)
        self._admissions = Admissions(config, self._sequences, self._pixels, self._links.require_attention)
        self._next_seq_id = 1
        self._draining = False

    @property
    def info(self) -> RuntimeInfo:
        """Facts of the loaded model, alike for all engines. Raises Unavailable before the first one was ready."""
        return self._links.info

    @property
    def replicas(self) -> tuple[wire.Stats | None, ...]:
        """The newest statistics of each engine; None while there is none."""
        return self._links.stats

    @property
    def stats(self) -> wire.Stats | None:
        """Of all engines that are there together; None while there is none."""
        return total(self.replicas)

    @property
    def recovery(self) -> RecoveryStats:
        """What became of lost engines' sequences."""
        return self._sequences.stats

    @property
    def reserved(self) -> int:
        """Places taken at the door by requests whose body is still being read."""
        return self._admissions.reserved

    @property
    def idle(self) -> bool:
        """Nothing admitted is unfinished."""
        return not self._sequences and not self.reserved

    def unready_reason(self) -> str | None:
        """Why a new request would not run at once; None when it would."""
        return self._refusal() or self._links.unready_reason()

    @property
    def is_full(self) -> bool:
        """A new request would be refused for now."""
        try:
            self.require_memory()
            self._admissions.require_places(1)
        except Overloaded:
            return True
        return False

    def _refusal(self) -> str | None:
        """Why new requests are not taken. Once there was an engine they wait for the next one like the others; the
        supervisor sees to it that it comes, or ends the server."""
        if self._draining:
            return "the server is shutting down"
        return None if self._links.had_one else self._links.unready_reason()

    def admit(self) -> Admission:
        """Take a place for one sequence. Raises Overloaded or Unavailable."""
        if reason := self._refusal():
            raise Unavailable(reason)
        self.require_memory()
        return self._admissions.admit()

    def submit(
        self, requests: list[GenerationRequest], admission: generation.Admission
    ) -> list[generation.RequestStream]:
        """Start them all or none. Raises Overloaded; BadRequest for what even an empty queue would not hold, and for
        what makes engines crash."""
        self._quarantine.refuse(requests)
        self._admissions.require_room(requests)
        admission.release()
        self._admissions.require_places(sum(request.n for request in requests))
        streams = [self._start(request, admission.deadline) for request in requests]
        self._send_due()
        return [*streams]

    def _start(self, request: GenerationRequest, deadline: float) -> ClientStream:
        first = self._next_seq_id
        self._next_seq_id += request.n
        seq_ids = range(first, self._next_seq_id)
        stream = ClientStream(self.abort, seq_ids, len(request.prompt_ids), self._max_unread_events)
        for choice, message in enumerate(submits_of(request, seq_ids, deadline)):
            self._sequences.add(Live(stream=stream, choice=choice, request=request, message=message))
            self._pixels.add(request)
        return stream

    def _send_due(self) -> None:
        """Give the engines that are there the sequences that they should have and have not."""
        for live, place in self._dispatcher.due(self._links.places, is_one_coming=self._links.is_one_coming):
            self._sequences.sent(live, place.engine)
            self._submit(live, self._pixels.first(live.message.seq_id, live.request, place.engine))

    def _submit(self, live: Live, brings: set[bytes]) -> None:
        """Send the sequence to its engine, where it stands, with the pixels of these keys."""
        if (link := self._links.of(live.engine)) is not None:
            link.send(*with_images(live.replay, live.request.images, brings))

    def shut_down(self) -> None:
        """Take nothing more, and end what is unfinished with an error."""
        self._draining = True
        for link in self._links:
            link.lose("the server is shutting down")
        for live in self._sequences:
            self._end(live, FinishReason.ABORT, "the server is shutting down")

    def abort(self, seq_ids: list[int]) -> None:
        """Forget these sequences here and in their engines."""
        by_engine: defaultdict[int, list[int]] = defaultdict(list)
        for seq_id in seq_ids:
            if (live := self._forget(seq_id)) is not None:
                by_engine[live.engine].append(seq_id)
        for engine, known in by_engine.items():
            if (link := self._links.of(engine)) is not None:
                link.send(wire.Abort(known))
        if by_engine:
            self._send_due()

    def _forget(self, seq_id: int) -> Live | None:
        live = self._sequences.remove(seq_id)
        if live is not None:
            live.stream.live.discard(live.choice)
            self._pixels.remove(seq_id, live.request, live.engine)
        return live

    async def run(self) -> None:
        """Receive from this server's processes until cancelled. Raises WireError for nonsense of the supervisor, and
        for an engine of another version."""
        while True:
            is_one_missing = self._links.is_one_missing
            received = await self._socket.receive(EXPIRY_POLL_MS if is_one_missing else None)
            if is_one_missing or self._sequences.has_suspects:
                self._expire()
            if received is not None:
                await self._hear(*received)

    async def _hear(self, identity: bytes, message: wire.ToApi | wire.WireError) -> None:
        link = self._links.from_identity(identity)
        if isinstance(message, wire.WireError):
            await self._from_nonsense(identity, message, link)
        elif identity == wire.SUPERVISOR:
            await self._from_supervisor(message)
        elif isinstance(message, wire.Hello | wire.Loading):
            if identity == wire.engine_identity(message.generation) and 0 <= message.replica < len(self._links):
                await self._from_starting_engine(self._links[message.replica], message)
        elif link is not None:
            self._from_engine(link, message)

    async def _from_nonsense(self, identity: bytes, error: wire.WireError, link: EngineLink | None) -> None:
        if identity == wire.SUPERVISOR:
            raise error
        if link is None:
            logger.warning("%r is no process of this server; dropped what it sent: %s", identity, error)
            return
        link.newest_down = link.generation
        link.lose(f"the engine sent nonsense: {error}")
        await self._socket.tell_supervisor(wire.Broken(link.newest_down, str(error)))

    async def report_health(self) -> None:
        """Tell the supervisor, once it has spoken, every HEALTH_SECONDS until cancelled."""
        while True:
            if self._watched:
                await self._socket.tell_supervisor(wire.Health(self.unready_reason(), self.is_full, self.replicas))
            await asyncio.sleep(HEALTH_SECONDS)

    async def _from_supervisor(self, message: wire.ToApi) -> None:
        if isinstance(message, wire.Watch):
            self._watched = True
            for report in (wire.Listening(self._url), *(link.newest_start for link in self._links)):
                await self._socket.tell_supervisor(report)
        elif isinstance(message, wire.EngineDown):
            self._engine_ended(message)
        elif isinstance(message, wire.Drain):
            self._draining = True
            self._on_drain(message.timeout)

    async def _from_starting_engine(self, link: EngineLink, message: wire.Hello | wire.Loading) -> None:
        if message.generation <= link.newest_down:
            return
        link.start(message)
        self._send_due()
        if self._watched:
            await self._socket.tell_supervisor(message)

    def _from_engine(self, link: EngineLink, message: wire.ToApi) -> None:
        link.hear(message)
        self._pixels.heard(link.generation)
        if isinstance(message, wire.Events):
            for event in message.events:
                self._deliver(event)

    def _deliver(self, event: wire.Event) -> None:
        live = self._sequences.get(event.seq_id)
        if live is None:
            return
        if event.refusal == PixelsMissing.__name__:
            self._submit(live, self._pixels.missing(event.seq_id, live.request, live.engine))
            return
        was_proved = live.is_proved
        if event.token_ids or event.pooled:
            self._sequences.take(live, event.token_ids)
        if event.finish_reason is not None or event.refusal:
            self._forget(event.seq_id)
        live.stream.deliver(live.choice, event)
        if not was_proved:
            self._send_due()

    def _end(self, live: Live, reason: FinishReason, message: str) -> None:
        """End a sequence that no engine has."""
        self._deliver(wire.Event(live.message.seq_id, finish_reason=reason, message=message))

    def _expire(self) -> None:
        """What waits here."""
        now = time.monotonic()
        for live in self._sequences:
            if now >= live.message.deadline and self._links.of(live.engine) is None:
                self._end(live, FinishReason.TIMEOUT, "the request's deadline passed while there was no engine")

    def _engine_ended(self, message: wire.EngineDown) -> None:
        """Its requests go to another one, or wait for the next."""
        link, generation = self._links[message.replica], message.generation
        link.newest_down = generation
        if generation >= link.generation:
            link.lose(message.reason)
        if generation > link.newest_ready:
            self._sequences.start_failed(link.replica)
        self._pixels.engine_lost(generation)
        for live in self._sequences.engine_lost(generation, link.replica, from_outside=message.from_outside):
            logger.error("sequence %d has repeatedly made the engine crash", live.message.seq_id)
            self._quarantine.add(live.request)
            self._end(live, FinishReason.ERROR, "the request has repeatedly made the engine crash")
        self._send_due()
