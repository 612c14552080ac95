"""Grammars to matchers, within limits. Used by `worker.py` in its process and `matchers.py` in the engine's."""

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from server.grammar.errors import GrammarError
from server.grammar.vocabulary import Vocabulary

NOTHING_MATCHES = "nothing matches it"
_REGEX_FAULT = re.compile(
    r"(?:invalid regex \".*\" \(in regex\): )?regex parse error:\n    .*\n    ( *)\^+\nerror: (.*)"
)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\):")
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=5_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""In the grammar library's units: some 20 ms for the first steps, 20 ms for a mask, 40 MB of states. Calls of 128 tools
take 3 000 items; an ambiguous grammar takes more with every token, and time with the cube of their number."""


class _Tokens:
    """The attributes that `TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        """Only asked for the tokens of forced text, which grammars here do not use (`lark._OPTIONS`)."""
        raise NotImplementedError


def token_trie(vocabulary: Vocabulary) -> LLTokenizer:
    """Takes some 0.2 s for 50 000 tokens; serves any number of grammars."""
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(vocabulary.eos_ids))


def compile_grammar(source: str, trie: LLTokenizer) -> LLMatcher:
    """At the beginning of an output. Lets other threads run meanwhile. Raises GrammarError."""
    matcher = LLMatcher(trie, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(_readable(matcher.get_error()))
    return matcher


def check_start(matcher: LLMatcher) -> None:
    """Raises GrammarError where no output has a first token. Lets other threads run meanwhile."""
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(_readable(matcher.get_error()))
    if not any(mask):
        raise GrammarError(NOTHING_MATCHES)


def _readable(error: str) -> str:
    """In one line, without what the library shows of the grammar; it begins with line and column, where it has them."""
    message = error.partition("\n   1 | ")[0].partition("\n<non-verbose/>")[0]
    if message in ("NoExtension", "NoExtensionBias"):
        return NOTHING_MATCHES
    message = _REGEX_FAULT.sub(_regex_fault, message)
    return " ".join(_PLACE.sub(r"line \1, column \2:", message).split())


def _regex_fault(found: re.Match[str]) -> str:
    return f"at character {len(found[1])} of a regular expression: {found[2]}"
