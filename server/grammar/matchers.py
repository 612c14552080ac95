"""The grammars of live sequences: compiled in a thread, followed token by token. Owned by the engine's loop.

A compiled grammar is kept for other sequences; each sequence follows a copy of its own, whose state follows from its
output tokens. A mask takes some 20 us (SmolLM2's vocabulary, JSON); masks are made between plan and execution.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

from llguidance import LLMatcher

from scheduler.request import Request
from server.grammar.compiler import compile_grammar, token_trie
from server.grammar.digits import MAX_DIGITS, DigitLimit, DigitRun
from server.grammar.errors import GrammarError
from server.grammar.vocabulary import Vocabulary

MAX_COMPILED = 64
MAX_COMPILED_CHARS = 2**20
"""Grammars that are kept though no sequence follows them, and their texts together: a large one takes a hundred times
the memory of its text."""


class _Model:
    """What is made of a vocabulary once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.trie = token_trie(vocabulary)
        self.digit_limit = DigitLimit(vocabulary.tokens)
        self.mask_bytes = 4 * -(-len(vocabulary.tokens) // 32)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar at the beginning of an output; never advanced."""

    model: _Model
    matcher: LLMatcher


class _Follower:
    """Where one output is in its grammar."""

    def __init__(self, grammar: Compiled, json_after: str | None) -> None:
        self._model = grammar.model
        self._matcher = grammar.matcher.deep_copy()
        self._run = None if json_after is None else DigitRun(mark=json_after.encode())
        """At the end of the outputs."""
        self._num_outputs = 0
        self._drafts: list[int] = []
        """Taken after the outputs."""

    def next_tokens(self, tokens: "array[int]", num_prompt: int, drafts: list[int]) -> bytes:
        new = tokens[num_prompt + self._num_outputs :].tolist()
        possible = self._take_outputs(new) and self._take_drafts(drafts)
        mask = self._matcher.compute_bitmask()[: self._model.mask_bytes]
        if not possible or self._matcher.is_error():  # a matcher that has failed would let the output end
            return bytes(self._model.mask_bytes)
        return mask if self._run is None else self._shortened(mask, self._run)

    def _take_outputs(self, new: list[int]) -> bool:
        """False where they do not match, which the masks before should have seen to."""
        if not new:
            return True
        self._take_back_drafts()
        self._num_outputs += len(new)
        if self._run is not None:
            self._run.feed(self._text(new))
        return self._matcher.consume_tokens(new)

    def _take_drafts(self, drafts: list[int]) -> bool:
        """False where they do not match; then the row after them is not looked at."""
        if self._drafts != drafts[: len(self._drafts)]:
            self._take_back_drafts()
        more = drafts[len(self._drafts) :]
        taken = self._matcher.try_consume_tokens(more) if more else 0
        self._drafts += more[:taken]
        return taken == len(more)

    def _take_back_drafts(self) -> None:
        if self._drafts:
            self._matcher.rollback(len(self._drafts))
            self._drafts = []

    def _shortened(self, mask: bytes, run: DigitRun) -> bytes:
        if self._drafts:
            run = replace(run)
            run.feed(self._text(self._drafts))
        return mask if run.length < MAX_DIGITS else self._model.digit_limit.shorten(mask)

    def _text(self, tokens: list[int]) -> bytes:
        return b"".join(map(self._model.tokens.__getitem__, tokens))


class Matchers:
    """Implements `scheduler.masks.TokenMasks`."""

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        """`read_vocabulary` is called in a thread when the first grammar comes."""
        self._read_vocabulary = read_vocabulary
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._waiting: list[tuple[Request, Future[Compiled]]] = []
        """In order of arrival."""
        self._followers: dict[int, _Follower] = {}

    @cached_property
    def _model(self) -> _Model:
        return _Model(self._read_vocabulary())

    def _compile(self, source: str) -> Compiled:
        return Compiled(self._model, compile_grammar(source, self._model.trie))

    def _compiling(self, source: str) -> "Future[Compiled]":
        """In the works, or kept from before."""
        future = self._compiled.pop(source, None) or self._threads.submit(self._compile, source)
        self._compiled[source] = future
        while len(self._compiled) > MAX_COMPILED or sum(map(len, self._compiled)) > MAX_COMPILED_CHARS:
            self._compiled.popitem(last=False)
        return future

    def prepare(self, request: Request) -> None:
        """Compile its grammar; `take_ready` gives it back."""
        assert request.sampling.grammar is not None, "only those with a grammar are prepared"
        self._waiting.append((request, self._compiling(request.sampling.grammar.source)))

    @property
    def busy(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._waiting)

    def take_ready(self) -> list[tuple[Request, GrammarError | None]]:
        """The requests whose grammar can be followed from now on, until `forget`, or why it cannot."""
        ready = [entry for entry in self._waiting if entry[1].done()]
        self._waiting = [entry for entry in self._waiting if entry not in ready]
        return [(request, self._follow(request, future)) for request, future in ready]

    def _follow(self, request: Request, future: "Future[Compiled]") -> GrammarError | None:
        grammar = request.sampling.grammar
        try:
            compiled = future.result()
        except GrammarError as error:
            return error
        self._followers[request.seq_id] = _Follower(compiled, None if grammar is None else grammar.json_after)
        return None

    def forget(self, seq_id: int) -> None:
        """The sequence has ended. Harmless for one without a grammar."""
        self._followers.pop(seq_id, None)
        if self._waiting:
            self._waiting = [entry for entry in self._waiting if entry[0].seq_id != seq_id]

    def next_tokens(self, seq_id: int, tokens: "array[int]", num_prompt: int, drafts: "array[int]") -> bytes:
        """See `TokenMasks`."""
        return self._followers[seq_id].next_tokens(tokens, num_prompt, drafts.tolist())
