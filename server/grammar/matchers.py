"""The grammars of live sequences: compiled in a thread, followed token by token. Owned by the engine's loop.

A compiled grammar is kept for other sequences; each sequence follows a copy of its own, whose state follows from its
output tokens. Masks are made between plan and execution.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

from scheduler.masks import MaskRow
from scheduler.plan import INT
from scheduler.request import Request
from server.grammar.compiler import compile_grammar
from server.grammar.errors import GrammarError
from server.grammar.follower import Compiled, Follower, Model
from server.grammar.vocabulary import Vocabulary

MAX_COMPILED = 64
MAX_COMPILED_CHARS = 2**20
"""Grammars that are kept though no sequence follows them, and their texts together: a large one takes a hundred times
the memory of its text."""


class Matchers:
    """Implements `scheduler.masks.TokenMasks`."""

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        """`read_vocabulary` is called in a thread when the first grammar comes."""
        self._read_vocabulary = read_vocabulary
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._waiting: list[tuple[Request, Future[Compiled]]] = []
        """In order of arrival."""
        self._followers: dict[int, Follower] = {}

    @cached_property
    def _model(self) -> Model:
        return Model(self._read_vocabulary())

    def _compile(self, source: str) -> Compiled:
        return Compiled(self._model, source, compile_grammar(source, self._model.trie))

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
        grammar, max_tokens = request.sampling.grammar, request.sampling.max_tokens
        try:
            compiled = future.result()
        except GrammarError as error:
            return error
        assert grammar is not None, "only those with a grammar are prepared"
        self._followers[request.seq_id] = Follower(compiled, grammar, max_tokens)
        return None

    def forget(self, seq_id: int) -> None:
        """The sequence has ended. Harmless for one without a grammar."""
        self._followers.pop(seq_id, None)
        if self._waiting:
            self._waiting = [entry for entry in self._waiting if entry[0].seq_id != seq_id]

    def next_tokens(self, rows: Sequence[MaskRow]) -> "array[int]":
        """See `TokenMasks`."""
        masks = array(INT, bytes(self._model.mask_bytes * len(rows)))
        address, size = masks.buffer_info()[0], self._model.mask_bytes
        for index, row in enumerate(rows):
            mask = memoryview(masks).cast("B")[index * size : (index + 1) * size]
            self._followers[row.seq_id].fill(row, mask, address + index * size)
        return masks
