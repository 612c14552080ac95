"""How long a number in JSON may get. A model that cannot stop would write digits for ever, and grammars let it.

Used by `matchers.py`, engine process.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_DIGITS = 40
"""Of a number: more than any integer or float of 128 bits has. Those of the last token may exceed it."""
_QUOTE, _ESCAPE = b'"\\'
_DIGITS = b"0123456789"
_NUMBER = _DIGITS + b".eE+-"


@dataclass(slots=True)
class DigitRun:
    """How many digits the number has so far that was last written."""

    mark: bytes = b""
    """Where it stands, JSON begins."""
    length: int = 0
    in_string: bool = False
    escaped: bool = False
    tail: bytes = b""
    """The end of the text, in which the mark may have begun."""

    def feed(self, text: bytes) -> None:
        """The text goes on."""
        if self.mark:
            self.tail, found, after = (self.tail + text).partition(self.mark)
            self.tail = self.tail[-len(self.mark) :]
            if found:
                self.mark, self.in_string, self.escaped = b"", False, False
                text = after
        for byte in text:
            if self.escaped:
                self.escaped = False
            elif self.in_string and byte == _ESCAPE:
                self.escaped = True
            elif byte == _QUOTE:
                self.in_string = not self.in_string
            if self.in_string or byte not in _NUMBER:
                self.length = 0
            elif byte in _DIGITS:
                self.length += 1


class DigitLimit:
    """Takes tokens that begin with a digit out of masks."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        bits = ["0" if data and data[0] in _DIGITS else "1" for data in reversed(tokens)]
        self._others = int("".join(bits), 2)

    def shorten(self, mask: bytes) -> bytes:
        """The mask without them; as it is where nothing else would be left, as in a long constant."""
        limited = int.from_bytes(mask, "little") & self._others
        return limited.to_bytes(len(mask), "little") if limited else mask
