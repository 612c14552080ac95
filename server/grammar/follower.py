"""Where one output is in its grammar. Owned by `matchers.py`, engine process."""

from dataclasses import dataclass

from llguidance import LLMatcher

from scheduler.masks import MaskRow
from scheduler.request import OutputGrammar
from server.grammar.closing import Closing
from server.grammar.compiler import compile_grammar, token_trie
from server.grammar.digits import MAX_DIGITS, DigitLimit, JsonPlaces, digits_at_end
from server.grammar.vocabulary import Vocabulary

MAX_RESTARTS = 16
"""Of an output whose matcher fails: the library's limit of states counts what drafts and other outputs needed, too."""


class Model:
    """What is made of a vocabulary once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.trie = token_trie(vocabulary)
        self.digit_limit = DigitLimit(vocabulary.tokens)
        self.closing = Closing(vocabulary, self.trie)
        self.mask_bytes = 4 * -(-len(vocabulary.tokens) // 32)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar at the beginning of an output; never advanced."""

    model: Model
    source: str
    matcher: LLMatcher


class Follower:
    """Says what may come next, row by row."""

    def __init__(self, compiled: Compiled, grammar: OutputGrammar, max_tokens: int) -> None:
        self._model, self._source, self._restarts = compiled.model, compiled.source, MAX_RESTARTS
        self._matcher = compiled.matcher.deep_copy()
        self._places = None if grammar.json_after is None else JsonPlaces(grammar.json_after, grammar.json_begins)
        self._max_tokens = max_tokens
        self._window = self._model.closing.window(compiled.matcher) if grammar.close_before_max_tokens else 0
        """So many tokens before the last the output is led to its end."""
        self._text = bytearray()
        """Of the outputs, where some of it is JSON."""
        self._num_outputs = 0
        self._drafts: list[int] = []
        """Taken after the outputs."""

    def fill(self, row: MaskRow, mask: memoryview, address: int) -> None:
        """What may come next at the row, into zeros, which stay where nothing may. `address` is the mask's."""
        if self._go_to(row):
            self._write(mask, address)
        if self._matcher.is_error() and self._restarts:
            self._restart(row.tokens[row.num_prompt :].tolist())
            if self._take_drafts(row.drafts.tolist()):
                self._write(mask, address)

    def _restart(self, outputs: list[int]) -> None:
        """From a grammar that nobody has used: then it fails because of this output, or not at all."""
        self._restarts -= 1
        self._matcher, self._drafts = compile_grammar(self._source, self._model.trie), []
        self._matcher.consume_tokens(outputs)

    def _go_to(self, row: MaskRow) -> bool:
        """False where the row cannot be: the outputs do not match, which the masks before should have seen to, or the
        drafts do not; then it is not looked at."""
        if len(row.tokens) - row.num_prompt > self._num_outputs and not self._take_outputs(
            row.tokens[row.num_prompt + self._num_outputs :].tolist()
        ):
            return False
        return not (row.drafts or self._drafts) or self._take_drafts(row.drafts.tolist())

    def _write(self, mask: memoryview, address: int) -> None:
        self._matcher.unsafe_compute_mask_ptr(address, len(mask))
        if self._matcher.is_error():  # it would let the output end
            mask[:] = bytes(len(mask))
            return
        if self._places is not None:
            text = self._text + self._spelled(self._drafts) if self._drafts else self._text
            if digits_at_end(text) >= MAX_DIGITS and self._places.ends_in_json(bytes(text)):
                mask[:] = self._model.digit_limit.shorten(bytes(mask))
        left = self._max_tokens - self._num_outputs - len(self._drafts)
        if 0 < left <= self._window:
            mask[:] = self._model.closing.narrow(bytes(mask), self._matcher, left)

    def _take_outputs(self, new: list[int]) -> bool:
        self._take_back_drafts()
        self._num_outputs += len(new)
        if self._places is not None:
            self._text += self._spelled(new)
        return self._matcher.consume_tokens(new)

    def _take_drafts(self, drafts: list[int]) -> bool:
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

    def _spelled(self, tokens: list[int]) -> bytes:
        return b"".join(map(self._model.tokens.__getitem__, tokens))
