"""Grammars to matchers, within limits. Used by `worker.py` in its process and `matchers.py` in the engine's."""

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from server.grammar.errors import GrammarError
from server.grammar.vocabulary import Vocabulary

NOTHING_MATCHES = "nothing matches it"
CHECKED_STEPS = 32
_SIGNS = '"{[:,'
"""Of JSON, those first that lead to where most may follow."""
_REGEX_FAULT = re.compile(
    r"(?:invalid regex \".*\" \(in regex\): )?regex parse error:\n    .*\n    ( *)\^+\nerror: (.*)"
)
_TOO_MANY_ITEMS = re.compile(r"Too many items|Current row has \d+ items")
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
        """Only asked for the tokens of forced text, which grammars here do not use (`lark._OPTIONS`). The library tries
        it once when it is told of it, and takes any exception for a tokenizer that wants another type of text."""
        raise AssertionError("no grammar forces text")


def token_trie(vocabulary: Vocabulary) -> LLTokenizer:
    """Takes some 0.2 s for 50 000 tokens; serves any number of grammars."""
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(vocabulary.eos_ids))


def compile_grammar(source: str, trie: LLTokenizer) -> LLMatcher:
    """At the beginning of an output. Lets other threads run meanwhile. Raises GrammarError."""
    matcher = LLMatcher(trie, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(_readable(matcher.get_error()))
    return matcher


def check_steps(matcher: LLMatcher, trie: LLTokenizer) -> None:
    """Raises GrammarError where no output has a first token, or where the first `CHECKED_STEPS` tokens of one that has
    as many signs as it can come to a limit. Takes the matcher there. Lets other threads run meanwhile."""
    signs = [tokens[0] for sign in _SIGNS if len(tokens := trie.greedy_tokenize(sign)) == 1]
    ends = sum(1 << token for token in trie.eos_tokens)
    for step in range(CHECKED_STEPS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise GrammarError(_readable(matcher.get_error()))
        if not step and not allowed:
            raise GrammarError(NOTHING_MATCHES)
        if not (going_on := allowed & ~ends):
            break
        matcher.consume_token(next((sign for sign in signs if going_on >> sign & 1), going_on.bit_length() - 1))


def _readable(error: str) -> str:
    """In one line, without what the library shows of the grammar; it begins with line and column, where it has them."""
    message = error.partition("\n   1 | ")[0].partition("\n<non-verbose/>")[0]
    if message in ("NoExtension", "NoExtensionBias"):
        return NOTHING_MATCHES
    if _TOO_MANY_ITEMS.search(message):
        return (
            "at some place of an output too much may follow: too many alternatives, or properties that are not required"
        )
    message = _REGEX_FAULT.sub(_regex_fault, message)
    return " ".join(_PLACE.sub(r"line \1, column \2:", message).split())


def _regex_fault(found: re.Match[str]) -> str:
    return f"at character {len(found[1])} of a regular expression: {found[2]}"
