"""How long a number in JSON may get. A model that cannot stop would write digits for ever, and grammars let it.

Used by `follower.py`, engine process. Texts are outputs as bytes.
"""

import re
from collections.abc import Sequence

MAX_DIGITS = 40
"""Of a number: more than any integer or float of 128 bits has. Those of the last token may exceed it."""
_DIGITS = b"0123456789"
_NUMBER = _DIGITS + b".eE+-"
_MAX_TAIL = 256
"""What is looked at of a text to find the number at its end."""
_CLOSED_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_PART = re.compile(rb'"(?:[^"\\]|\\.)*("?)|[\[{]|[\]}]', re.DOTALL)
_SCALAR = re.compile(rb"\s*[-+.\w]*")


def digits_at_end(text: bytes | bytearray) -> int:
    """Of the number that the text ends with, if it does."""
    tail = bytes(text[-_MAX_TAIL:])
    number = tail[len(tail.rstrip(_NUMBER)) :]
    return len(number) - len(number.translate(None, _DIGITS))


class JsonPlaces:
    """Where an output is JSON."""

    def __init__(self, after: str, begins: Sequence[str]) -> None:
        """See `OutputGrammar`."""
        self._mark = after.encode()
        spelled = [re.escape(begin.encode()).replace(rb"\ ", rb" ?") for begin in begins]
        self._begins = re.compile(b"|".join(spelled)) if begins else None

    def ends_in_json(self, text: bytes) -> bool:
        """Whether what comes next is JSON, and not inside a string."""
        if self._mark and self._mark in text:
            text = text.partition(self._mark)[2]
        if self._begins is None:
            return not ends_in_string(text)
        position = 0
        while found := self._begins.search(text, position):
            end = _end_of_json(text, found.end())
            if end is None:
                return not ends_in_string(text[found.end() :])
            position = end
        return False


def ends_in_string(json: bytes) -> bool:
    """Whether JSON that is cut off is cut in a string."""
    return b'"' in _CLOSED_STRING.sub(b"", json)


def _end_of_json(text: bytes, start: int) -> int | None:
    """Of the JSON that begins there; None where the text ends first."""
    scalar = _SCALAR.match(text, start)
    assert scalar is not None, "it may be empty"
    if text[start : scalar.end()].strip():
        return scalar.end() if scalar.end() < len(text) else None
    depth = 0
    for part in _PART.finditer(text, start):
        if part[0][:1] == b'"':
            if not part[1]:
                return None
        else:
            depth += 1 if part[0] in b"[{" else -1
        if depth == 0:
            return part.end()
    return None


class DigitLimit:
    """Takes tokens that begin with a digit out of masks."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        bits = ["0" if data and data[0] in _DIGITS else "1" for data in reversed(tokens)]
        self._others = int("".join(bits), 2)

    def shorten(self, mask: bytes) -> bytes:
        """The mask without them; as it is where nothing else would be left, as in a long constant."""
        limited = int.from_bytes(mask, "little") & self._others
        return limited.to_bytes(len(mask), "little") if limited else mask
