"""The engine as the gateway sees it: admission, submit, abort, and a `ClientStream` of events for each request.

Owns the API process's ZeroMQ socket. Routes use it through the protocols of `server/generation.py`;
`server/api_process.py` runs its receive loop. The engine process and the supervisor connect to the socket; their
identities tell them apart.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
import zmq.asyncio

from model_runtime.config import RuntimeInfo
from scheduler.config import SchedulerConfig
from scheduler.request import FinishReason, PixelsMissing
from server import generation, wire
from server.client_pixels import PixelLedger
from server.client_stream import ClientStream
from server.errors import BadRequest, Overloaded, Unavailable
from server.generation import GenerationRequest
from server.wire_submit import submits_of, with_images

logger = logging.getLogger(__name__)


MAX_UNHEARD_BYTES = 64 * 1024 * 1024
"""Of messages (without pixels) to an engine since it last spoke, which may pile up while it computes; then requests are
refused."""


def bind(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    """The socket of an EngineClient. Its queue is not limited in messages: what does not fit would be lost."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(address)
    return router


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


@dataclass(frozen=True, slots=True)
class _Live:
    """A sequence that has not ended."""

    stream: ClientStream
    choice: int
    request: GenerationRequest
    message: wire.Submit
    """As it was sent first."""


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
        url: str,
        on_drain: Callable[[float], None],
    ) -> None:
        self._socket, self._config, self._stall_timeout = socket, config, stall_timeout
        self._max_unread_events = max_unread_events
        self._url, self._on_drain = url, on_drain
        self._info: RuntimeInfo | None = None
        self._stats: wire.Stats | None = None
        self._generation = -1
        self._newest_down = -1
        self._unheard_bytes = 0
        self._down_reason = "the model is loading"
        self._newest_start: wire.Hello | wire.Loading = wire.Loading(0, "starting", 0.0)
        self._watched = False
        self._last_sign_of_life = 0.0
        self._sequences: dict[int, _Live] = {}
        self._pixels = PixelLedger(max_queued_image_bytes)
        self._next_seq_id = 1
        self._queued_tokens = 0
        self._draining = False
        self.reserved = 0
        """Places taken at the door by requests whose body is still being read."""

    @property
    def info(self) -> RuntimeInfo:
        """Facts of the loaded model. Raises Unavailable before the first engine was ready."""
        if self._info is None:
            raise Unavailable(self._not_ready_message())
        return self._info

    @property
    def stats(self) -> wire.Stats | None:
        """The newest statistics of the running engine; None while there is none."""
        return self._stats

    @property
    def idle(self) -> bool:
        """Nothing admitted is unfinished."""
        return not self._sequences and not self.reserved

    def _not_ready_message(self) -> str:
        if isinstance(self._newest_start, wire.Loading):
            return f"{self._down_reason} ({self._newest_start.stage}, {self._newest_start.fraction:.0%})"
        return self._down_reason

    def unready_reason(self) -> str | None:
        """Why new requests are not taken; None when they are."""
        if self._draining:
            return "the server is shutting down"
        if self._generation < 0:
            return self._not_ready_message()
        silence = time.monotonic() - self._last_sign_of_life
        if silence > self._stall_timeout:
            return f"the engine has given no sign of life for {silence:.0f} s"
        return None

    def admit(self) -> Admission:
        """Take a place for one sequence. Raises Overloaded or Unavailable."""
        if reason := self.unready_reason():
            raise Unavailable(reason)
        self._require_places(1)
        self.reserved += 1
        return Admission(self, time.monotonic() + self._config.request_timeout)

    def _require_places(self, count: int) -> None:
        if self._unheard_bytes > MAX_UNHEARD_BYTES:
            raise Overloaded("the engine has not caught up with the requests that it was sent; try again")
        taken = self.reserved + len(self._sequences)
        if taken + count > self._config.max_outstanding:
            raise Overloaded(
                f"the queue is full: {taken} sequences are running or waiting and "
                f"{self._config.max_outstanding} is the limit; try again"
            )

    def submit(
        self, requests: list[GenerationRequest], admission: generation.Admission
    ) -> list[generation.RequestStream]:
        """Start them all or none. Raises Overloaded; BadRequest for what even an empty queue would not hold."""
        if self._generation < 0:
            raise Unavailable(self._not_ready_message())
        sequences = sum(request.n for request in requests)
        tokens = sum(len(request.prompt_ids) * request.n for request in requests)
        most_sequences, most_tokens = self._config.max_outstanding, self._config.max_queued_tokens
        if sequences > most_sequences:
            raise BadRequest(f"The request has {sequences} sequences; the queue holds {most_sequences}.", param="n")
        if tokens > most_tokens:
            raise BadRequest(f"The request has {tokens} prompt tokens in all; the queue holds {most_tokens}.")
        if self._queued_tokens + tokens > most_tokens:
            raise Overloaded(f"the queue holds {self._queued_tokens} prompt tokens and has no room for {tokens} more")
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
            self._sequences[message.seq_id] = live = _Live(stream, choice, request, message)
            self._queued_tokens += stream.prompt_tokens
            self._submit(live, self._pixels.add(message.seq_id, request))
        return stream

    def _submit(self, live: _Live, brings: set[bytes]) -> None:
        """Send the sequence with the pixels of these keys."""
        self._send(*with_images(live.message, live.request.images, brings))

    def shut_down(self) -> None:
        """Take nothing more, and end what is unfinished with an error."""
        self._engine_gone("the server is shutting down")

    def abort(self, seq_ids: list[int]) -> None:
        """Forget these sequences here and in the engine."""
        known = [seq_id for seq_id in seq_ids if self._forget(seq_id)]
        if known:
            self._send(wire.Abort(known))

    def _forget(self, seq_id: int) -> bool:
        live = self._sequences.pop(seq_id, None)
        if live is None:
            return False
        live.stream.live.discard(live.choice)
        self._queued_tokens -= live.stream.prompt_tokens
        self._pixels.remove(seq_id, live.request)
        return True

    def _send(self, message: wire.ToEngine, pixels: Sequence[bytes | memoryview] = ()) -> None:
        if self._generation < 0:
            return
        frame = wire.encode(message)
        self._unheard_bytes += len(frame)
        frames = [wire.engine_identity(self._generation), frame, *pixels]
        future = asyncio.ensure_future(self._socket.send_multipart(frames, copy=not pixels))
        future.add_done_callback(self._on_sent)

    def _on_sent(self, future: "asyncio.Future[zmq.MessageTracker | None]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.warning("the engine cannot be reached: %s", error)
            self._engine_gone(f"the engine cannot be reached: {error}")

    async def run(self) -> None:
        """Receive from this server's processes until cancelled. Raises WireError when one of them sends nonsense."""
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                message = wire.decode_to_api(b"".join(frames))
            except wire.WireError as error:
                if identity in (wire.SUPERVISOR, wire.engine_identity(self._generation)):
                    raise
                logger.warning("%r is no process of this server; dropped what it sent: %s", identity, error)
                continue
            if identity == wire.SUPERVISOR:
                await self._from_supervisor(message)
            elif isinstance(message, wire.Hello | wire.Loading):
                if identity == wire.engine_identity(message.generation) and message.generation > self._newest_down:
                    await self._from_starting_engine(message)
            elif identity == wire.engine_identity(self._generation):
                self._from_engine(message)

    async def _from_supervisor(self, message: wire.ToApi) -> None:
        if isinstance(message, wire.Watch):
            self._watched = True
            for report in (wire.Listening(self._url), self._newest_start):
                await self._socket.send_multipart([wire.SUPERVISOR, wire.encode(report)])
        elif isinstance(message, wire.EngineDown):
            self._newest_down = message.generation
            if message.generation >= self._generation:
                self._engine_gone(message.reason)
        elif isinstance(message, wire.Drain):
            self._draining = True
            self._on_drain(message.timeout)

    async def _from_starting_engine(self, message: wire.Hello | wire.Loading) -> None:
        self._last_sign_of_life = time.monotonic()
        self._newest_start = message
        if isinstance(message, wire.Hello):
            if message.version != wire.WIRE_VERSION:
                raise wire.WireError(f"the engine speaks wire version {message.version}, not {wire.WIRE_VERSION}")
            self._generation, self._info, self._stats = message.generation, message.info, message.stats
        if self._watched:
            await self._socket.send_multipart([wire.SUPERVISOR, wire.encode(message)])

    def _from_engine(self, message: wire.ToApi) -> None:
        self._last_sign_of_life, self._unheard_bytes = time.monotonic(), 0
        self._pixels.heard()
        if isinstance(message, wire.Events):
            self._stats = message.stats
            for event in message.events:
                self._deliver(event)
        elif isinstance(message, wire.Stats):
            self._stats = message

    def _deliver(self, event: wire.Event) -> None:
        live = self._sequences.get(event.seq_id)
        if live is None:
            return
        if event.refusal == PixelsMissing.__name__:
            self._submit(live, self._pixels.missing(event.seq_id, live.request))
            return
        if event.finish_reason is not None or event.refusal:
            self._forget(event.seq_id)
        live.stream.deliver(live.choice, event)

    def _engine_gone(self, reason: str) -> None:
        self._generation, self._stats, self._down_reason, self._unheard_bytes = -1, None, reason, 0
        self._pixels.heard()
        for seq_id in list(self._sequences):
            self._deliver(wire.Event(seq_id, finish_reason=FinishReason.ABORT, message=reason))
