"""Bytes of tokens to text, incrementally: whole characters, stop strings, and nothing shown that must be taken back.

Used by `server/choice.py` and `server/output.py`, one of each per choice; API process. Pure: no I/O, no clock.
"""

import codecs


class TextDecoder:
    """The characters of one output. However the bytes are cut into pushes, the concatenated text is the same.

    Bytes that are no UTF-8 become U+FFFD, one per maximal ill-formed part (Unicode 3.9); a character that is still
    incomplete at the end is dropped. Output continues the prompt, so a SentencePiece token's leading space is kept: the
    text is the bytes of its tokens, also for the first.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._undecoded = 0
        self._surplus = 0

    def push(self, data: bytes) -> str:
        """The characters that are whole with these bytes."""
        text = self._decoder.decode(data)
        undecoded = len(self._decoder.getstate()[0])
        self._surplus += len(text.encode()) - (self._undecoded + len(data) - undecoded)
        self._undecoded = undecoded
        return text

    def take_surplus(self) -> int:
        """Bytes by which the text, as UTF-8, has grown more than the bytes that it stands for, since the last call:
        U+FFFD is three, and may stand for one."""
        surplus, self._surplus = self._surplus, 0
        return surplus


class StopFilter:
    """Ends a text at the first stop string to be complete, the longest of those that end at the same character.

    The text before it stays (with `include_stop` the stop string too); text that may be its beginning is held back
    until that is decided.
    """

    def __init__(self, stop: tuple[str, ...] = (), include_stop: bool = False) -> None:
        """`stop` holds non-empty strings."""
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self._include_stop = include_stop
        self._matchers = [_StopMatcher(text) for text in sorted(stop, key=len, reverse=True)]
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is certain with this piece. "" once a stop string was found. Without `may_stop`, a stop string
        that this piece completes is text like any other."""
        if self.stopped is not None:
            return ""
        if not self._matchers:
            return text
        known = len(self._held)
        self._held += text
        for position, character in enumerate(text, start=known + 1):
            found = [matcher for matcher in self._matchers if matcher.advance(character)]
            if found and may_stop:
                return self._stop_at(position, found[0].pattern)
        safe = len(self._held) - max(matcher.matched for matcher in self._matchers)
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown

    def finish(self) -> str:
        """The text that was held back, when the output has ended."""
        rest, self._held = self._held, ""
        return rest

    def _stop_at(self, end: int, stop: str) -> str:
        self.stopped = stop
        shown, self._held = self._held[: end if self._include_stop else end - len(stop)], ""
        return shown


class _StopMatcher:
    """Finds one string in a text that comes character by character, in constant amortised time per character
    (Knuth, Morris, Pratt 1977)."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        """Length of the longest suffix of the text that is a prefix of the pattern."""
        self._borders: list[int] = []
        """At i: length of the longest proper prefix of pattern[: i + 1] that is also its suffix. Known as far as the
        text has ever matched: of most patterns that is hardly anything, and there may be hundreds of choices."""

    def advance(self, character: str) -> bool:
        """Whether the pattern is complete with this character."""
        if self.matched == len(self.pattern):
            self.matched = self._borders[-1]
        while self.matched and character != self.pattern[self.matched]:
            self.matched = self._borders[self.matched - 1]
        self.matched += character == self.pattern[self.matched]
        if self.matched > len(self._borders):
            self._add_border()
        return self.matched == len(self.pattern)

    def _add_border(self) -> None:
        index, length = len(self._borders), self._borders[-1] if self._borders else 0
        while length and self.pattern[index] != self.pattern[length]:
            length = self._borders[length - 1]
        self._borders.append(length + (index > 0 and self.pattern[index] == self.pattern[length]))
