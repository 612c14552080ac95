"""How an output comes to its end in time: the shortest way that is easily found, and which tokens leave room for it.

Used by `follower.py`, engine process. Pure: functions of where a matcher is and of how many tokens are left. The way is
spelled byte by byte, each the first in an order of preference that the grammar allows. Neither the bytes nor the tokens
that they are cut into depend on what was before, so who takes the first token of a way is on the rest of it.
"""

from llguidance import LLMatcher, LLTokenizer

from server.grammar.vocabulary import Vocabulary

DETOUR = 32
"""Tokens by which the way from where an output is may be longer than the one from its beginning."""
UNKNOWN_WAY = 96
"""Tokens, where none is found from the beginning."""
MAX_WAY_BYTES = 384
"""Of a way: three a token. A search that goes astray, in a text whose end it does not see, ends here."""
FREE_TOKENS = 16
"""More than the way takes: so long any token may come, though one could open something that takes long to close."""
SPARE_TOKENS = 4
"""Fewer than these, and only the way may be gone; from there to FREE_TOKENS also tokens without structure, which may
make it a little longer: the first byte of a sign that UTF-8 writes in four makes it three longer."""
_STRUCTURE = frozenset(b'{}[]()<>",:\\\n')
_CONTINUATION = bytes(range(0x80, 0xC0))
"""Of a sign that UTF-8 writes in several bytes all but the first."""
_CLOSERS, _LOWER, _DIGITS = b'}])>",:', bytes(range(97, 123)), b"1234567890"
_IN_TEXT = b'"' + _LOWER
_IN_ADDRESS = b'"@' + _LOWER
_BETWEEN_SIGNS = _CLOSERS + _DIGITS + b"tfn[{-"
_IN_WORDS = _CLOSERS + b"@Z./-_+;" + bytes(range(90, 64, -1)) + _DIGITS + _LOWER


def _bits(flags: list[bool]) -> int:
    return int("".join("1" if flag else "0" for flag in reversed(flags)), 2)


class Closing:
    """What is made of a vocabulary once."""

    def __init__(self, vocabulary: Vocabulary, trie: LLTokenizer) -> None:
        specials, ends = set(vocabulary.special_ids), set(vocabulary.eos_ids)
        tokens = [b"" if token in specials else data for token, data in enumerate(vocabulary.tokens)]
        self._trie = trie
        self._bytes = tokens
        self._of_byte = {data[0]: token for token, data in enumerate(tokens) if len(data) == 1}
        self._plain = _bits([bool(data) and _STRUCTURE.isdisjoint(data) for data in tokens])
        self._ends = sum(1 << token for token in ends)
        self._specials = sum(1 << token for token in specials - ends)
        self._orders = {order: self._order(order) for order in (_IN_TEXT, _IN_ADDRESS, _BETWEEN_SIGNS, _IN_WORDS)}

    def _order(self, first: bytes) -> list[int]:
        """Tokens of single bytes."""
        return [self._of_byte[byte] for byte in dict.fromkeys((*first, *range(256))) if byte in self._of_byte]

    def window(self, matcher: LLMatcher) -> int:
        """So many tokens before the last that is allowed ways begin to be looked for. `matcher` is at the beginning."""
        way = self.way(int.from_bytes(matcher.deep_copy().compute_bitmask(), "little"), matcher)
        return DETOUR + (UNKNOWN_WAY if way is None else len(way) + 1)

    def narrow(self, mask: bytes, matcher: LLMatcher, left: int) -> bytes:
        """Of what may come next those tokens behind which the output can end with the last of `left` tokens; all where
        no way is known or where it is too long. `matcher` is where the output is, and is not moved."""
        allowed = int.from_bytes(mask, "little")
        way = self.way(allowed, matcher)
        if way is None or (spare := left - len(way) - 1) < 0 or spare >= FREE_TOKENS:
            return mask
        kept = 1 << way[0] if way else self._ends
        if spare >= SPARE_TOKENS:
            kept |= self._plain
        return (allowed & kept or allowed).to_bytes(len(mask), "little")

    def way(self, allowed: int, matcher: LLMatcher) -> list[int] | None:
        """Tokens behind which the output may end; a token that is no text (the end of reasoning) only comes first."""
        at = matcher.deep_copy()
        first = []
        if (specials := allowed & self._specials) and not allowed & self._ends:
            first = [(specials & -specials).bit_length() - 1]
            at.consume_tokens(first)
        try:
            return None if (spelled := self._spelled(at)) is None else first + self._cut(spelled)
        except UnicodeDecodeError:  # the grammar wants bytes that are no text
            return None

    def _spelled(self, at: LLMatcher) -> bytes | None:
        """What leads to an end; the matcher is moved there. None where it is too long or cannot be spelled."""
        spelled = b""
        while not at.is_accepting():
            step = at.compute_ff_bytes() or self._next_byte(at)
            tokens = [self._of_byte[byte] for byte in step if byte in self._of_byte]
            if not step or len(spelled) + len(step) > MAX_WAY_BYTES or len(tokens) < len(step):
                return None
            if at.try_consume_tokens(tokens) < len(tokens):
                return None
            spelled += step
        return spelled

    def _next_byte(self, at: LLMatcher) -> bytes:
        """The best of those that may follow; empty where none may."""
        if self._may_follow(at, b"{") and self._may_follow(at, b"}"):  # so both are text
            order = _IN_TEXT if self._may_follow(at, b"(") else _IN_ADDRESS
        else:
            order = _BETWEEN_SIGNS if self._may_follow(at, b"\n") else _IN_WORDS
        for token in self._orders[order]:
            if at.validate_tokens([token]):
                return self._bytes[token]
        return b""

    def _may_follow(self, at: LLMatcher, byte: bytes) -> bool:
        return byte[0] in self._of_byte and at.validate_tokens([self._of_byte[byte[0]]]) == 1

    def _cut(self, text: bytes) -> list[int]:
        """Into tokens: the longest that fits first. What is missing of a sign that has begun is spelled in bytes."""
        rest = text.lstrip(_CONTINUATION)
        begun = [self._of_byte[byte] for byte in text[: len(text) - len(rest)]]
        return begun + self._trie.greedy_tokenize(rest.decode())
