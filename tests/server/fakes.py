"""A scripted engine and a tiny byte-level tokenizer, for tests of the gateway."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from fastapi import FastAPI
from msgspec import structs
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from model_runtime.config import RuntimeInfo
from model_runtime.pooling_config import PoolingRecipe
from scheduler.request import OutputGrammar
from server.app import create_app
from server.errors import ApiError, BadRequest, InternalError, Overloaded
from server.gateway_config import GatewayConfig
from server.generation import Admission, GenerationRequest, RecoveryStats, RequestStream
from server.grammar.compiler import token_trie
from server.grammar.grammar import Grammar
from server.grammar.verdicts import verdict_on
from server.prompt.source import TokenizerSource
from server.prompt.tokenizer import Tokenizer
from server.prompt.vocabulary import vocabulary_of
from server.wire import Event, Logprob, Stats

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
WORDS = ("he", "hel", "hell", "hello")
MODEL = "tiny"
MAX_MODEL_LEN = 512
HIDDEN_SIZE = 4
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(*more: str, template: str = TEMPLATE) -> Tokenizer:
    """Specials, then one token per byte, then the beginnings of "hello", then `more` specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *alphabet, *WORDS, *more]
    merges = [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o")]
    fast = tokenizers.Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIALS, *more)])
    source = TokenizerSource(
        fast=fast, tokens=tokens, chat_template=template, special_variables={"eos_token": SPECIALS[EOS]}
    )
    return Tokenizer(source)


TOKENIZER = make_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
"""A call as models of the format `hermes` write it."""


def ids_of(text: str, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    """The tokens of an output."""
    return tokenizer.encode(text, add_special_tokens=False, allow_special=True).tolist()


def logprob_of(token_id: int) -> float:
    """What the fake engine reports for a token."""
    return -0.01 * token_id


Script = Callable[[GenerationRequest, int], list[Event | Exception]]


def says(
    *texts: str, reason: str = "stop", per_event: int = 1, cached: int = 0, tokenizer: Tokenizer = TOKENIZER
) -> Script:
    """Choice i produces texts[i % len]: `per_event` tokens in each event; with "stop" an end-of-sequence token follows.
    max_tokens is honoured."""

    def script(request: GenerationRequest, choice: int) -> list[Event | Exception]:
        ids = ids_of(texts[choice % len(texts)], tokenizer) + ([EOS] if reason == "stop" else [])
        ended = reason
        if len(ids) > request.sampling.max_tokens:
            ids, ended = ids[: request.sampling.max_tokens], "length"
        groups = [ids[start : start + per_event] for start in range(0, len(ids), per_event)]
        events = [_event(request, group, first=index == 0, cached=cached) for index, group in enumerate(groups)]
        events[-1] = structs.replace(events[-1], finish_reason=ended)
        return list(events)

    return script


def breaks(text: str) -> Script:
    """The first three tokens of the text, then a fault of the server's."""

    def script(request: GenerationRequest, choice: int) -> list[Event | Exception]:
        return [*says(text)(request, choice)[:3], InternalError("broken")]

    return script


def states_of(ids: Sequence[int]) -> list[list[float]]:
    """The fake engine's hidden state of each token of a text, HIDDEN_SIZE numbers."""
    return [[token_id, position, -token_id / 8, 0.5] for position, token_id in enumerate(ids)]


def pools(request: GenerationRequest, choice: int) -> list[Event | Exception]:
    """The sum of all states, or the last one."""
    states = states_of(request.prompt_ids)
    pooled = [*map(sum, zip(*states, strict=True))] if request.pooling == "mean" else states[-1]
    return [Event(seq_id=0, finish_reason="stop", pooled=array("d", pooled).tobytes())]


def _event(request: GenerationRequest, ids: list[int], *, first: bool, cached: int) -> Event:
    wanted, prompt_wanted = request.sampling.logprobs, request.sampling.prompt_logprobs
    prompt = request.prompt_ids[1:].tolist() if first and prompt_wanted >= 0 else []
    return Event(
        seq_id=0,
        token_ids=ids,
        logprobs=[_logprob(token_id, wanted) for token_id in ids] if wanted >= 0 else [],
        prompt_logprobs=[_logprob(token_id, prompt_wanted) for token_id in prompt],
        cached_tokens=cached if first else 0,
    )


def _logprob(token_id: int, top: int) -> Logprob:
    ids = [(token_id + step) % VOCAB_SIZE for step in range(top)]
    return Logprob(logprob_of(token_id), ids, [logprob_of(token_id) - step for step in range(top)], 1)


def make_stats(generation: int = 1, **counters: int) -> Stats:
    """Statistics of an idle engine with 100 blocks, except for `counters`."""
    values: dict[str, Any] = {
        "step_id": 5,
        "last_step_time": time.monotonic(),
        "busy": False,
        "running": 0,
        "waiting": 0,
        "free_blocks": 100,
        "cached_blocks": 0,
        "total_blocks": 100,
        "preemptions": 0,
        "prefix_queries": 0,
        "prefix_hits": 0,
        "prompt_tokens": 0,
        "generation_tokens": 0,
    }
    return Stats(generation=generation, **(values | counters))


class FakeAdmission:
    def __init__(self, engine: "FakeEngine") -> None:
        self.engine, self.held = engine, True
        self.deadline = time.monotonic() + engine.request_timeout

    def release(self) -> None:
        if self.held:
            self.held = False
            self.engine.reserved -= 1


class FakeStream:
    def __init__(self, engine: "FakeEngine", request: GenerationRequest) -> None:
        self.engine, self.request = engine, request
        self.scripts = [engine.script(request, choice) for choice in range(request.n)]
        self.live = set(range(request.n))
        self.finished_by_gateway: list[int] = []
        self.cancelled: list[int] = []
        self.delivered = 0

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """One event of each choice in turn; waits for ever after `engine.hold_after` events."""
        position = 0
        while self.live:
            for choice in sorted(self.live):
                if self.engine.hold_after is not None and self.delivered >= self.engine.hold_after:
                    await asyncio.Event().wait()
                await asyncio.sleep(self.engine.delay)
                event = self.scripts[choice][position]
                if isinstance(event, Exception):
                    self.live -= self.live if isinstance(event, ApiError) else set()
                    raise event
                self.delivered += 1
                if event.finish_reason is not None:
                    self.live.discard(choice)
                yield choice, event
            position += 1

    def finish_choice(self, index: int) -> None:
        self.finished_by_gateway.append(index)
        self.live.discard(index)

    def close(self) -> None:
        self.cancelled += sorted(self.live)
        self.live.clear()


@dataclass
class FakeEngine:
    """Plays `script` for every request."""

    script: Script = field(default_factory=lambda: says("hello world"))
    places: int = 1000
    delay: float = 0.0
    hold_after: int | None = None
    unready: ApiError | None = None
    stats: Stats | None = field(default_factory=make_stats)
    reserved: int = 0
    memory_is_short: bool = False
    streams: list[FakeStream] = field(default_factory=list)
    max_model_len: int = MAX_MODEL_LEN
    generates: bool = True
    request_timeout: float = 60.0
    recovery: RecoveryStats = field(default_factory=RecoveryStats)

    @property
    def info(self) -> RuntimeInfo:
        if self.unready is not None:
            raise self.unready
        return RuntimeInfo(
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN_SIZE,
            eos_token_ids=(EOS,),
            generates=self.generates,
            num_blocks=100,
            block_size=16,
            weight_bytes=0,
            kv_bytes=0,
            max_num_batched_tokens=512,
            description="fake",
        )

    @property
    def replicas(self) -> tuple[Stats | None, ...]:
        return (self.stats,)

    @property
    def live(self) -> int:
        return sum(len(stream.live) for stream in self.streams)

    @property
    def requests(self) -> list[GenerationRequest]:
        return [stream.request for stream in self.streams]

    @property
    def cancelled(self) -> int:
        return sum(len(stream.cancelled) for stream in self.streams)

    def require_memory(self) -> None:
        if self.memory_is_short:
            raise Overloaded("no memory")

    @property
    def is_full(self) -> bool:
        return self.reserved + self.live >= self.places

    def unready_reason(self) -> str | None:
        return None if self.unready is None else self.unready.message

    def admit(self) -> FakeAdmission:
        if self.unready is not None:
            raise self.unready
        if self.is_full:
            raise Overloaded("the queue is full")
        self.reserved += 1
        return FakeAdmission(self)

    def submit(self, requests: list[GenerationRequest], admission: Admission) -> list[RequestStream]:
        admission.release()
        if self.live + sum(request.n for request in requests) > self.places:
            raise Overloaded("the queue is full")
        started = [FakeStream(self, request) for request in requests]
        self.streams += started
        return list(started)


class LocalChecker:
    """Checks grammars in this process."""

    def __init__(self, tokenizer: Tokenizer = TOKENIZER) -> None:
        self.vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size, [EOS])
        self.trie = token_trie(self.vocabulary)

    async def check(self, grammar: Grammar) -> OutputGrammar:
        verdict = verdict_on(grammar, self.vocabulary, self.trie)
        if verdict.grammar is None:
            raise BadRequest(f"{grammar.param}: {verdict.error}", param=grammar.param)
        return verdict.grammar


def make_app(
    engine: FakeEngine, tokenizer: Tokenizer = TOKENIZER, recipe: PoolingRecipe | None = None, **options: Any
) -> FastAPI:
    """An app over the fake engine."""
    return create_app(GatewayConfig(**options), engine, tokenizer, MODEL, LocalChecker(), pooling=recipe)
