"""The engine's loop: drain the inbox, plan, execute, commit, publish; then again.

The only place where a request's path turns round. Owns the scheduler and the executor (rank 0); run by
`engine_process.py`, talks to the API process. A broken invariant ends the process loudly; the supervisor starts a new
one.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import zmq

from model_runtime.config import RuntimeInfo
from model_runtime.executor import Executor
from scheduler.config import SchedulerConfig
from scheduler.encoder_cache import EncoderLimits
from scheduler.masks import TokenMasks
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request, SchedulerError, TokenEvent, TokenLogprob
from scheduler.scheduler import Scheduler
from scheduler.speculation import FIXED_ROWS, StepCost
from server import wire
from server.grammar.errors import GrammarError
from server.grammar.matchers import Matchers
from server.grammar.vocabulary import Vocabulary
from server.memory_guard import MemoryGuard
from server.prompt.image_source import load_tokenizer_for, read_images
from server.prompt.vocabulary import vocabulary_of
from server.wire_submit import unpack_images

HEARTBEAT_SECONDS = 0.25
COMPILE_POLL_MS = 2
"""How often a loop without other work looks whether a grammar is compiled."""


class EngineLoop:
    """Scheduler and executor joined to a socket. `matchers` is the scheduler's."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        scheduler: Scheduler,
        executor: Executor,
        matchers: Matchers,
        generation: int,
        memory: MemoryGuard,
        on_pass: Callable[[], None],
        replica: int = 0,
    ) -> None:
        """`on_pass` is called whenever the loop comes round."""
        self._socket, self._scheduler, self._executor = socket, scheduler, executor
        self._generation, self._replica = generation, replica
        self._on_pass, self._matchers, self._memory = on_pass, matchers, memory
        self._refusals: list[wire.Event] = []
        self._last_publish = 0.0
        self._last_step_time = 0.0
        self._steps = self._in_flight = 0

    def run(self) -> None:
        """Forever."""
        self._greet()
        while True:
            self._on_pass()
            self._drain_inbox()
            self._add_compiled()
            self._relieve_memory()
            self._begin_steps()
            self._end_step()
            self._publish()

    def _begin_steps(self) -> None:
        """As many as there are, and may be."""
        while self._in_flight < self._executor.info.steps_in_flight and (plan := self._plan()) is not None:
            self._begin(plan)
            self._in_flight += 1

    def _end_step(self) -> None:
        """The one that began first, if there is one."""
        if self._in_flight:
            self._in_flight -= 1
            self._commit(self._executor.end())

    def _relieve_memory(self) -> None:
        if self._memory.look() and self._memory.is_scarce:
            while self._in_flight:
                self._end_step()
            self._commit(self._executor.execute(self._scheduler.plan_relief()))

    def _plan(self) -> StepPlan | None:
        return self._scheduler.plan(time.monotonic())

    def _begin(self, plan: StepPlan) -> None:
        self._executor.begin(plan)

    def _commit(self, result: StepResult) -> None:
        self._last_step_time = time.monotonic()
        self._scheduler.commit(result, self._last_step_time)
        self._steps += 1
        if not self._scheduler.has_work():
            self._scheduler.check_invariants()

    def _greet(self) -> None:
        """Ready to serve: tell the facts that were learned while loading."""
        hello = wire.Hello(
            version=wire.WIRE_VERSION,
            generation=self._generation,
            info=self._executor.info,
            stats=self._stats(),
            replica=self._replica,
        )
        self._socket.send(wire.encode(hello))

    def _drain_inbox(self) -> None:
        """Take every waiting message; with nothing to do, wait for one until the next heartbeat."""
        if not self._scheduler.has_work():
            self._socket.poll(COMPILE_POLL_MS if self._matchers.busy else int(HEARTBEAT_SECONDS * 1000))
        while self._socket.poll(0):
            frame, *pixels = self._socket.recv_multipart()
            message = wire.decode_to_engine(frame)
            if isinstance(message, wire.Submit):
                self._add(message, pixels)
                continue
            if pixels:
                raise wire.WireError(f"{len(pixels)} frames follow a message that has none")
            for seq_id in message.seq_ids:
                self._matchers.forget(seq_id)
                self._scheduler.abort(seq_id)

    def _add(self, message: wire.Submit, pixels: list[bytes]) -> None:
        request = Request(
            seq_id=message.seq_id,
            prompt_ids=wire.unpack_ids(message.prompt_ids),
            output_ids=wire.unpack_ids(message.output_ids),
            sampling=message.sampling,
            priority=message.priority,
            deadline=message.deadline,
            cache_salt=message.cache_salt,
            leader=message.leader,
            images=unpack_images(message, pixels),
            pooling=message.pooling,
        )
        if request.sampling.grammar is not None:
            self._matchers.prepare(request)
        else:
            self._accept(request)

    def _add_compiled(self) -> None:
        """The requests whose grammar was compiled meanwhile."""
        for request, error in self._matchers.take_ready():
            if error is None:
                self._accept(request)
            else:
                self._refuse(request, error)

    def _accept(self, request: Request) -> None:
        try:
            self._scheduler.add(request, time.monotonic())
        except SchedulerError as error:
            self._refuse(request, error)

    def _refuse(self, request: Request, error: SchedulerError | GrammarError) -> None:
        self._matchers.forget(request.seq_id)
        self._refusals.append(wire.Event(request.seq_id, refusal=type(error).__name__, message=str(error)))

    def _publish(self) -> None:
        """Send what happened; without events, send statistics as a sign of life when one is due."""
        happened = self._scheduler.take_events()
        for event in happened:
            if event.finish_reason is not None:
                self._matchers.forget(event.seq_id)
        events = self._refusals + [to_wire(event) for event in happened]
        self._refusals = []
        now = time.monotonic()
        if events:
            self._socket.send(wire.encode(wire.Events(events, self._stats())))
        elif now - self._last_publish >= HEARTBEAT_SECONDS:
            self._socket.send(wire.encode(self._stats()))
        else:
            return
        self._last_publish = now

    def _stats(self) -> wire.Stats:
        stats = self._scheduler.stats()
        return wire.Stats(
            generation=self._generation,
            step_id=self._steps,
            last_step_time=self._last_step_time,
            busy=self._scheduler.has_work() or self._matchers.busy,
            running=stats.running,
            waiting=stats.waiting,
            free_blocks=stats.free_blocks + stats.cached_blocks,
            cached_blocks=stats.cached_blocks,
            total_blocks=stats.total_blocks,
            preemptions=stats.preemptions,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            prompt_tokens=stats.prompt_tokens,
            generation_tokens=stats.generation_tokens,
            encoder_bytes=stats.encoder_bytes,
            encoder_hits=stats.encoder_hits,
            images_encoded=stats.images_encoded,
            drafts=stats.speculation.drafts,
            draft_tokens=stats.speculation.draft_tokens,
            accepted_tokens=stats.speculation.accepted_tokens,
            accepted_per_position=stats.speculation.accepted_per_position,
            ranks=self._executor.ranks,
        )


def _logprob_to_wire(logprob: TokenLogprob) -> wire.Logprob:
    ids, values = [token for token, _ in logprob.top], [value for _, value in logprob.top]
    return wire.Logprob(logprob.value, ids, values, logprob.rank)


def to_wire(event: TokenEvent) -> wire.Event:
    """The event as the API process gets it."""
    return wire.Event(
        event.seq_id,
        list(event.token_ids),
        [_logprob_to_wire(entry) for entry in event.logprobs],
        [_logprob_to_wire(entry) for entry in event.prompt_logprobs],
        event.cached_tokens,
        event.finish_reason,
        event.stop_token_id,
        event.message,
        num_drafts=event.num_drafts,
        pooled=event.pooled,
    )


def read_vocabulary(model_path: Path, info: RuntimeInfo, image_folder: Path | None = None) -> Vocabulary:
    """The tokens that a model writes. Raises GrammarError for a model that cannot end an output."""
    tokenizer = load_tokenizer_for(model_path, read_images(image_folder or model_path), image_folder)
    return vocabulary_of(tokenizer, info.vocab_size, info.eos_token_ids)


def make_scheduler(
    config: SchedulerConfig,
    info: RuntimeInfo,
    masks: TokenMasks | None = None,
    fixed_rows: float = FIXED_ROWS,
) -> Scheduler:
    """The scheduler for a loaded model, within what was learned while loading it."""
    return Scheduler(
        replace(config, max_num_batched_tokens=info.max_num_batched_tokens, block_size=info.block_size),
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        encoder=EncoderLimits(
            cache_bytes=info.encoder_cache_bytes,
            bytes_per_embedding=info.bytes_per_embedding,
            max_image_pixels=info.max_image_pixels,
            whole_spans=info.whole_span > 0,
            adapted=info.adapts_images,
        ),
        masks=masks,
        step_cost=StepCost(fixed_rows=fixed_rows, draft_step=info.draft_cost),
        steps_in_flight=info.steps_in_flight,
        has_states=info.has_states,
    )
