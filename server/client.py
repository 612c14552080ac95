"""The engine as the gateway sees it: admission, submit, abort, and a `ClientStream` of events for each request.

Routes use it through the protocols of `server/generation.py`; `server/api_process.py` runs its receive loop. When an
engine is lost, requests wait here for the next one, which goes on with them (`replay.py`).
"""

import asyncio
import logging
import time
from collections.abc import Callable

import zmq.asyncio

from model_runtime.config import RuntimeInfo
from scheduler.config import SchedulerConfig
from scheduler.request import FinishReason, PixelsMissing
from server import generation, wire
from server.client_pixels import PixelLedger
from server.client_stream import ClientStream
from server.engine_link import NOWHERE, EngineLink, EngineNonsense
from server.errors import BadRequest, Overloaded, Unavailable
from server.generation import GenerationRequest, RecoveryStats
from server.memory_guard import MemoryGuard
from server.quarantine import Quarantine
from server.replay import Live, LiveSequences
from server.wire_submit import submits_of, with_images

logger = logging.getLogger(__name__)

EXPIRY_POLL_MS = 250
"""How often deadlines are looked at while there is no engine to do it."""
HEALTH_SECONDS = 0.25


class Admission:
    """A place in the queue: counted from the door until the request ends."""

    def __init__(self, client: "EngineClient", deadline: float) -> None:
        self._client, self._held = client, True
        self.deadline = deadline
        """time.monotonic() at which the request's time is over."""

    def release(self) -> None:
        """Give the place back. Idempotent; harmless after submit, which does it too."""
        self._client.reserved -= self._held
        self._held = False


class EngineClient:
    """Implements `server.generation.Engine` over a bound ROUTER socket."""

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        config: SchedulerConfig,
        *,
        max_unread_events: int,
        max_queued_image_bytes: int,
        stall_timeout: float,
        memory: MemoryGuard,
        url: str,
        on_drain: Callable[[float], None],
    ) -> None:
        self._link, self._config = EngineLink(socket, stall_timeout), config
        self._max_unread_events = max_unread_events
        self.require_memory = memory.require
        self._url, self._on_drain = url, on_drain
        self._watched = False
        self._sequences = LiveSequences()
        self._quarantine = Quarantine()
        self._pixels = PixelLedger(max_queued_image_bytes)
        self._next_seq_id = 1
        self._draining = False
        self.reserved = 0
        """Places taken at the door by requests whose body is still being read."""

    @property
    def info(self) -> RuntimeInfo:
        """Facts of the loaded model. Raises Unavailable before the first engine was ready."""
        if self._link.info is None:
            raise Unavailable(self._link.unready_reason() or "the model is loading")
        return self._link.info

    @property
    def stats(self) -> wire.Stats | None:
        """The newest statistics of the running engine; None while there is none."""
        return self._link.stats

    @property
    def recovery(self) -> RecoveryStats:
        """What became of lost engines' sequences."""
        return self._sequences.stats

    @property
    def idle(self) -> bool:
        """Nothing admitted is unfinished."""
        return not self._sequences and not self.reserved

    def unready_reason(self) -> str | None:
        """Why a new request would not run at once; None when it would."""
        return self._refusal() or self._link.unready_reason()

    @property
    def is_full(self) -> bool:
        """A new request would be refused for now."""
        try:
            self._require_room()
        except Overloaded:
            return True
        return False

    def _require_room(self) -> None:
        """For a new request. Raises Overloaded."""
        self.require_memory()
        self._require_places(1)

    def _refusal(self) -> str | None:
        """Why new requests are not taken. Once there was an engine they wait for the next one like the others; the
        supervisor sees to it that it comes, or ends the server."""
        if self._draining:
            return "the server is shutting down"
        return self._link.unready_reason() if self._link.info is None else None

    def admit(self) -> Admission:
        """Take a place for one sequence. Raises Overloaded or Unavailable."""
        if reason := self._refusal():
            raise Unavailable(reason)
        self._require_room()
        self.reserved += 1
        return Admission(self, time.monotonic() + self._config.request_timeout)

    def _require_places(self, count: int) -> None:
        self._link.require_attention()
        taken = self.reserved + len(self._sequences)
        if taken + count > self._config.max_outstanding:
            raise Overloaded(
                f"the queue is full: {taken} sequences are running or waiting and "
                f"{self._config.max_outstanding} is the limit; try again"
            )

    def submit(
        self, requests: list[GenerationRequest], admission: generation.Admission
    ) -> list[generation.RequestStream]:
        """Start them all or none. Raises Overloaded; BadRequest for what even an empty queue would not hold, and for
        what makes engines crash."""
        self._quarantine.refuse(requests)
        sequences = sum(request.n for request in requests)
        tokens = sum(len(request.prompt_ids) * request.n for request in requests)
        most_sequences, most_tokens = self._config.max_outstanding, self._config.max_queued_tokens
        if sequences > most_sequences:
            raise BadRequest(f"The request has {sequences} sequences; the queue holds {most_sequences}.", param="n")
        if tokens > most_tokens:
            raise BadRequest(f"The request has {tokens} prompt tokens in all; the queue holds {most_tokens}.")
        held = self._sequences.prompt_tokens
        if held + tokens > most_tokens:
            raise Overloaded(f"the queue holds {held} prompt tokens and has no room for {tokens} more")
        self._pixels.require_room(requests)
        admission.release()
        self._require_places(sequences)
        return [self._start(request, admission.deadline) for request in requests]

    def _start(self, request: GenerationRequest, deadline: float) -> ClientStream:
        first = self._next_seq_id
        self._next_seq_id += request.n
        seq_ids = range(first, self._next_seq_id)
        stream = ClientStream(self.abort, seq_ids, len(request.prompt_ids), self._max_unread_events)
        for choice, message in enumerate(submits_of(request, seq_ids, deadline)):
            self._sequences.add(Live(stream=stream, choice=choice, request=request, message=message))
            self._pixels.add(request)
        self._send_due()
        return stream

    def _send_due(self) -> None:
        """Give the engine, if there is one, the sequences that it should have and has not."""
        if self._link.generation == NOWHERE:
            return
        for live in self._sequences.due(self._link.generation):
            self._submit(live, self._pixels.first(live.message.seq_id, live.request))

    def _submit(self, live: Live, brings: set[bytes]) -> None:
        """Send the sequence, where it stands, with the pixels of these keys."""
        self._sequences.sent(live, self._link.generation)
        self._link.send(*with_images(live.replay, live.request.images, brings))

    def shut_down(self) -> None:
        """Take nothing more, and end what is unfinished with an error."""
        self._draining = True
        self._lose_engine("the server is shutting down")
        for live in self._sequences:
            self._end(live, FinishReason.ABORT, "the server is shutting down")

    def abort(self, seq_ids: list[int]) -> None:
        """Forget these sequences here and in the engine."""
        known = [seq_id for seq_id in seq_ids if self._forget(seq_id)]
        if known:
            self._link.send(wire.Abort(known))
            self._send_due()

    def _forget(self, seq_id: int) -> bool:
        live = self._sequences.remove(seq_id)
        if live is None:
            return False
        live.stream.live.discard(live.choice)
        self._pixels.remove(seq_id, live.request)
        return True

    async def run(self) -> None:
        """Receive from this server's processes until cancelled. Raises WireError for nonsense of the supervisor, and
        for an engine of another version."""
        while True:
            try:
                received = await self._link.receive(EXPIRY_POLL_MS)
            except EngineNonsense as error:
                self._link.newest_down = self._link.generation
                self._lose_engine(f"the engine sent nonsense: {error}")
                await self._link.tell_supervisor(wire.Broken(self._link.newest_down, str(error)))
                continue
            if self._link.generation == NOWHERE:
                self._expire()
            if received is None:
                continue
            identity, message = received
            if identity == wire.SUPERVISOR:
                await self._from_supervisor(message)
            elif isinstance(message, wire.Hello | wire.Loading):
                if identity == wire.engine_identity(message.generation) and message.generation > self._link.newest_down:
                    await self._from_starting_engine(message)
            elif identity == wire.engine_identity(self._link.generation):
                self._from_engine(message)

    async def report_health(self) -> None:
        """Tell the supervisor, once it has spoken, every HEALTH_SECONDS until cancelled."""
        while True:
            if self._watched:
                await self._link.tell_supervisor(wire.Health(self.unready_reason(), self.is_full, self._link.stats))
            await asyncio.sleep(HEALTH_SECONDS)

    async def _from_supervisor(self, message: wire.ToApi) -> None:
        if isinstance(message, wire.Watch):
            self._watched = True
            for report in (wire.Listening(self._url), self._link.newest_start):
                await self._link.tell_supervisor(report)
        elif isinstance(message, wire.EngineDown):
            self._engine_ended(message)
        elif isinstance(message, wire.Drain):
            self._draining = True
            self._on_drain(message.timeout)

    async def _from_starting_engine(self, message: wire.Hello | wire.Loading) -> None:
        self._link.start(message)
        self._send_due()
        if self._watched:
            await self._link.tell_supervisor(message)

    def _from_engine(self, message: wire.ToApi) -> None:
        self._link.hear(message)
        self._pixels.heard()
        if isinstance(message, wire.Events):
            for event in message.events:
                self._deliver(event)

    def _deliver(self, event: wire.Event) -> None:
        live = self._sequences.get(event.seq_id)
        if live is None:
            return
        if event.refusal == PixelsMissing.__name__:
            self._submit(live, self._pixels.missing(event.seq_id, live.request))
            return
        on_trial = live.points is not None
        if event.token_ids or event.pooled:
            self._sequences.take(live, event.token_ids)
        if event.finish_reason is not None or event.refusal:
            self._forget(event.seq_id)
        live.stream.deliver(live.choice, event)
        if on_trial:
            self._send_due()

    def _end(self, live: Live, reason: FinishReason, message: str) -> None:
        """End a sequence that no engine has."""
        self._deliver(wire.Event(live.message.seq_id, finish_reason=reason, message=message))

    def _expire(self) -> None:
        now = time.monotonic()
        for live in self._sequences:
            if now >= live.message.deadline:
                self._end(live, FinishReason.TIMEOUT, "the request's deadline passed while there was no engine")

    def _engine_ended(self, message: wire.EngineDown) -> None:
        self._link.newest_down = message.generation
        if message.generation >= self._link.generation:
            self._lose_engine(message.reason)
        for live in self._sequences.engine_lost(message.generation, from_outside=message.from_outside):
            logger.error("sequence %d has repeatedly made the engine crash", live.message.seq_id)
            self._quarantine.add(live.request)
            self._end(live, FinishReason.ERROR, "the request has repeatedly made the engine crash")

    def _lose_engine(self, reason: str) -> None:
        """Requests wait for the next one."""
        self._link.lose(reason)
        self._pixels.engine_lost()
