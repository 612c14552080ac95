"""Keeps users' text from becoming special tokens: finds what could, and interrupts it with a *breaker* character.

Used by `server/prompt/build.py`; API process. Pure. The breaker is a noncharacter that the request does not hold. It
goes into users' strings before the template is rendered and is taken out when the prompt is encoded
(`Tokenizer.encode_rendered`), so the text itself is unchanged. It is put

* after the first character of each special literal, in any case of letters (templates may change it);
* at an end of a string that could complete a literal begun by the template or by the string beside it: before text
  that is the rest of a literal or its middle, after text that is the beginning of one. White space around is looked
  through, since templates trim.

What this cannot see is a template that cuts users' text in the middle and joins the pieces with each other or with the
beginning of a literal; a chat template has no reason to.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from server.errors import BadRequest
from server.prompt.tokenizer import alternation

_BREAKERS = tuple(map(chr, range(0xFDD1, 0xFDF0)))


class SpecialText:
    """The special literals of a tokenizer."""

    def __init__(self, literals: Iterable[str]) -> None:
        known = set(literals)
        lowered = {literal.lower() for literal in known}
        pattern = alternation(known)
        self._literal = re.compile(pattern, re.IGNORECASE) if known else re.compile("(?!)")
        self._start = re.compile(f"(?={pattern}).", re.IGNORECASE | re.DOTALL)
        self._single = frozenset(literal for literal in known if len(literal) == 1)
        self._heads = frozenset(literal[:end] for literal in lowered for end in range(1, len(literal)))
        self._tails = frozenset(literal[start:] for literal in lowered for start in range(1, len(literal)))
        self._joined = "\0".join(lowered)
        self._longest = max(map(len, lowered), default=0)

    def protect(self, text: str, breaker: str) -> str:
        """The text with what could become a special token interrupted. Raises BadRequest for a special token of one
        character, which cannot be."""
        if not self._single.isdisjoint(text):
            raise BadRequest("The text contains a control character of the model.", param="messages")
        body = text.strip()
        before = breaker if self._may_continue(body) else ""
        after = breaker if self._may_begin(body) else ""
        if self._literal.search(body):
            body = self._start.sub(lambda match: match[0] + breaker, body)
        elif not (before or after):
            return text
        start = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        return text[:start] + before + body + after + text[end:]

    def _may_continue(self, body: str) -> bool:
        start = body[: self._longest].lower()
        return any(start[:end] in self._tails for end in range(1, len(start) + 1)) or (
            0 < len(body) < self._longest and start in self._joined
        )

    def _may_begin(self, body: str) -> bool:
        end = body[-self._longest :].lower() if self._longest else ""
        return any(end[start:] in self._heads for start in range(len(end)))


def choose_breakers(texts: Sequence[str], count: int) -> list[str]:
    """Noncharacters that occur in none of the texts, neither as themselves nor as JSON escapes (arguments of tool calls
    are JSON, and templates may escape). Raises BadRequest when there are not so many."""
    lowered = [text.lower() for text in texts]
    found: list[str] = []
    for breaker in _BREAKERS:
        if not any(breaker in text or escaped(breaker) in text for text in lowered):
            found.append(breaker)
        if len(found) == count:
            return found
    raise BadRequest("The messages contain too many different noncharacters.", param="messages")


def escaped(breaker: str) -> str:
    """How JSON escapes it, in lower case."""
    return f"\\u{ord(breaker):04x}"


def strings_in(value: object) -> list[str]:
    """Every string and every key of a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for key, item in value.items() for text in (key, *strings_in(item))]
    if isinstance(value, Sequence):
        return [text for item in value for text in strings_in(item)]
    return []


def protect_all(value: object, protect: Callable[[str], str]) -> object:
    """A JSON value with every string and every key protected."""
    if isinstance(value, str):
        return protect(value)
    if isinstance(value, Mapping):
        return {protect(str(key)): protect_all(item, protect) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [protect_all(item, protect) for item in value]
    return value
