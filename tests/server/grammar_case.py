"""An output written character by character, as the engine follows it."""

from array import array
from dataclasses import replace
from typing import Any

from scheduler.masks import MaskRow
from scheduler.plan import ints
from scheduler.request import Request, SamplingParams
from server.grammar.grammar import Grammar
from server.grammar.matchers import Matchers
from server.grammar.verdicts import verdict_on
from server.prompt.tokenizer import Tokenizer
from server.prompt.vocabulary import vocabulary_of
from tests.server.fakes import EOS, TOKENIZER, LocalChecker

NO_DRAFTS = ints()
PROMPT = ints([5, 6, 7])


def request_for(seq_id: int, grammar: Grammar, checker: LocalChecker, close_at: int | None = None) -> Request:
    """One whose output follows the grammar, and is closed before so many tokens."""
    verdict = verdict_on(grammar, checker.vocabulary, checker.trie)
    assert verdict.grammar is not None, verdict.error
    form = replace(verdict.grammar, close_before_max_tokens=close_at is not None)
    sampling = SamplingParams(max_tokens=close_at or 100, grammar=form)
    return Request(seq_id=seq_id, prompt_ids=PROMPT[:], sampling=sampling)


def wait(matchers: Matchers) -> list[Request]:
    """The requests whose grammar is compiled."""
    ready: list[Request] = []
    while matchers.busy:
        for request, error in matchers.take_ready():
            assert error is None, error
            ready.append(request)
    return ready


class Writer:
    """An output with a grammar."""

    def __init__(
        self, kind: Any, text: str, tokenizer: Tokenizer = TOKENIZER, close_at: int | None = None, **fields: Any
    ) -> None:
        checker = LocalChecker(tokenizer)
        self.tokenizer = tokenizer
        self.matchers = Matchers(lambda: vocabulary_of(tokenizer, tokenizer.vocab_size, [EOS]))
        self.matchers.prepare(request_for(1, Grammar(kind=kind, text=text, **fields), checker, close_at))
        wait(self.matchers)
        self.tokens = PROMPT[:]

    def allowed(self, drafts: "array[int]" = NO_DRAFTS) -> set[int]:
        """Tokens that may follow."""
        mask = self.matchers.next_tokens([MaskRow(1, self.tokens, len(PROMPT), drafts)]).tobytes()
        assert len(mask) == 4 * -(-self.tokenizer.vocab_size // 32)
        return {token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1}

    def ids(self, text: str) -> "array[int]":
        return self.tokenizer.encode(text, add_special_tokens=False, allow_special=True)

    def write(self, text: str) -> str:
        """As much of the text as is allowed."""
        ids = self.ids(text)
        for count, token in enumerate(ids):
            if token not in self.allowed():
                return self.tokenizer.decode(ids[:count], skip_special_tokens=False)
            self.tokens.append(token)
        return text

    @property
    def ends(self) -> bool:
        """Whether the output may end here."""
        return EOS in self.allowed()


def fits(kind: Any, text: str, output: str, **fields: Any) -> bool:
    """Whether the output, and its end, are allowed."""
    writer = Writer(kind, text, **fields)
    return writer.write(output) == output and writer.ends
