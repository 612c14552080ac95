"""The engine's inbox: what comes as frames reaches the scheduler whole, once its grammar is compiled, and nonsense ends
the process loudly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import msgspec
import pytest
import zmq

from model_runtime.config import RuntimeInfo
from model_runtime.executor import Executor
from scheduler.config import SchedulerConfig
from scheduler.encoder_cache import EncoderLimits
from scheduler.plan import doubles, ints
from scheduler.request import OutputGrammar, Pooling, SamplingParams
from scheduler.scheduler import Scheduler
from server import wire
from server.engine import EngineLoop
from server.generation import GenerationRequest
from server.grammar.matchers import Matchers
from server.memory_guard import MemoryGuard
from server.prompt.vocabulary import vocabulary_of
from server.wire_submit import submits_of, with_images
from tests.scheduler.driving import answer
from tests.server.fakes import EOS, TOKENIZER
from tests.server.test_client_images import shows
from tests.server.test_wire import BLUE, RED


@dataclass
class NoModel:
    """An executor that is never asked to compute."""

    info: RuntimeInfo
    ranks = ()


@dataclass
class Inbox:
    """An engine's loop, and the gateway's end of its socket."""

    loop: EngineLoop
    gateway: "zmq.Socket[bytes]"

    def send(self, *frames: bytes | memoryview) -> None:
        self.gateway.send_multipart(frames)
        self.loop._drain_inbox()

    def submit(self, seq_id: int, brings: set[bytes], *keys: bytes) -> None:
        request = shows(*keys)
        (message,) = submits_of(request, [seq_id], 1e9)
        message, pixels = with_images(message, request.images, brings)
        self.send(wire.encode(message), *pixels)

    def refusals(self) -> list[tuple[int, str]]:
        self.loop._last_publish = 0.0  # so that it says something
        self.loop._publish()
        message = wire.decode_to_api(self.gateway.recv())
        events = message.events if isinstance(message, wire.Events) else []
        return [(event.seq_id, event.refusal) for event in events if event.refusal]


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateway, engine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    gateway.setsockopt(zmq.RCVTIMEO, 5000)
    gateway.bind("inproc://inbox")
    engine.connect("inproc://inbox")
    limits = EncoderLimits(cache_bytes=10_000, bytes_per_embedding=4)
    matchers = Matchers(lambda: vocabulary_of(TOKENIZER, TOKENIZER.vocab_size, [EOS]))
    scheduler = Scheduler(SchedulerConfig(), num_blocks=64, max_model_len=256, encoder=limits, masks=matchers)
    loop = EngineLoop(engine, scheduler, cast(Executor, NoModel), matchers, 0, MemoryGuard(0), lambda: None)
    yield Inbox(loop, gateway)
    gateway.close(linger=0)
    engine.close(linger=0)
    context.term()


def test_images_reach_the_scheduler(inbox: Inbox) -> None:
    inbox.submit(1, {RED, BLUE}, RED, BLUE)
    plan = inbox.loop._scheduler.plan(0.0)
    assert plan is not None
    assert list(plan.encode.num_embeddings) == [4, 4]
    assert [bytes(pixels.data)[:2] for pixels in plan.encode.pixels] == [b"rs", b"bc"]
    assert list(plan.images.rows) == [1, 5]
    assert inbox.refusals() == []


def test_pixels_that_nobody_brought(inbox: Inbox) -> None:
    inbox.submit(1, {RED}, RED)
    inbox.submit(2, set(), RED)
    inbox.submit(3, {BLUE}, RED, BLUE)
    inbox.send(wire.encode(wire.Abort([1, 2, 3])))
    inbox.submit(4, set(), RED)
    inbox.submit(5, {RED}, RED, BLUE)
    assert inbox.refusals() == [(4, "PixelsMissing"), (5, "PixelsMissing")]
    inbox.submit(5, {RED, BLUE}, RED, BLUE)
    assert inbox.refusals() == []


@pytest.mark.parametrize("frames", [[b"\xc1"], [wire.encode(wire.Abort([1])), b"x"]])
def test_nonsense(inbox: Inbox, frames: list[bytes]) -> None:
    with pytest.raises(wire.WireError):
        inbox.send(*frames)
    inbox.submit(1, {RED}, RED)
    request = shows(RED)
    (message,) = submits_of(request, [2], 1e9)
    message, pixels = with_images(message, request.images, {RED})
    for wrong in ([], [*pixels, b""], [b"x"]):
        with pytest.raises(wire.WireError):
            inbox.send(wire.encode(message), *wrong)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pooled_sequences(inbox: Inbox, pooling: Pooling) -> None:
    sampling = SamplingParams(max_tokens=1)
    (message,) = submits_of(GenerationRequest(prompt_ids=ints([5, 6]), sampling=sampling, pooling=pooling), [1], 1e9)
    inbox.send(wire.encode(message))
    plan = inbox.loop._scheduler.plan(0.0)
    assert plan is not None
    assert (plan.pool.counts.tolist(), plan.sample.rows.tolist()) == ([2 if pooling == "mean" else 1], [])
    inbox.loop._scheduler.commit(replace(answer(plan), pooled=doubles([0.5, -3.0])), 0.0)
    inbox.loop._publish()
    received = wire.decode_to_api(inbox.gateway.recv())
    assert isinstance(received, wire.Events)
    expected = wire.Event(1, finish_reason="stop", pooled=doubles([0.5, -3.0]).tobytes())
    assert received.events == [expected]


@pytest.mark.parametrize("pooling", ["cls", "", 1, True])
def test_pooling_that_there_is_not(inbox: Inbox, pooling: object) -> None:
    (message,) = submits_of(GenerationRequest(prompt_ids=ints([5]), sampling=SamplingParams(max_tokens=1)), [1], 1e9)
    fields = msgspec.msgpack.decode(wire.encode(message))
    assert fields["pooling"] is None
    with pytest.raises(wire.WireError, match="pooling"):
        inbox.send(msgspec.msgpack.encode(fields | {"pooling": pooling}))


NO_FORCING = '\n%llguidance {"no_forcing": true}'


def _with_grammar(inbox: Inbox, seq_id: int, source: str) -> None:
    sampling = SamplingParams(max_tokens=4, grammar=OutputGrammar(source=source + NO_FORCING))
    request = GenerationRequest(prompt_ids=ints([5, 6]), sampling=sampling)
    (message,) = submits_of(request, [seq_id], 1e9)
    inbox.send(wire.encode(message))


def _compile(inbox: Inbox) -> None:
    while inbox.loop._matchers.busy:
        inbox.loop._drain_inbox()
        inbox.loop._add_compiled()


def test_requests_wait_for_their_grammar(inbox: Inbox) -> None:
    _with_grammar(inbox, 1, 'start: "a"')
    _with_grammar(inbox, 2, "start: (")
    _with_grammar(inbox, 3, 'start: "b"')
    assert not inbox.loop._scheduler.has_work()
    assert inbox.loop._stats().busy
    inbox.send(wire.encode(wire.Abort([3])))
    _compile(inbox)
    assert inbox.refusals() == [(2, "GrammarError")]
    plan = inbox.loop._scheduler.plan(0.0)
    assert plan is not None
    assert (plan.query_lens.tolist(), plan.sample.mask_rows.tolist()) == ([2], [0])
    (token,) = TOKENIZER.encode("a", add_special_tokens=False, allow_special=False)
    assert sum(word % 2**32 << 32 * place for place, word in enumerate(plan.sample.masks)) == 1 << token
    inbox.send(wire.encode(wire.Abort([1])))
    inbox.loop._publish()
    assert not inbox.loop._matchers._followers


def test_a_refused_request_leaves_no_grammar_behind(inbox: Inbox) -> None:
    sampling = SamplingParams(max_tokens=4, grammar=OutputGrammar(source='start: "a"'))
    request = GenerationRequest(prompt_ids=ints([5] * 256), sampling=sampling)
    (message,) = submits_of(request, [1], 1e9)
    inbox.send(wire.encode(message))
    _compile(inbox)
    assert inbox.refusals() == [(1, "NeverFits")]
    assert not inbox.loop._matchers._followers
