"""Sorts the output of a model that writes messages in channels, as GPT-OSS does (OpenAI's harmony format): what it
thinks, what it answers, and calls, which are left to `server/tools/harmony.py`. Used by `server/output.py`; API
process. Pure.

<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>
"""

import re
from collections.abc import Iterator

from server.reasoning import Kind, Piece, begun

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTION = "to=functions."
MAX_HEAD_CHARS = 512
"""Of what stands before a message's text, its mark included; where there is more it is text itself."""
_BEHIND = (END, CALL, RETURN, START, CHANNEL)
"""What follows a message's text."""
_RECIPIENT = re.compile(r"(?:^|\s)to=(?P<who>[^\s<]+)")
_HEADS = (CHANNEL, START, f" {FUNCTION}", FUNCTION)
"""What an output begins with, unless it goes on with a text."""


class ChannelSplitter:
    """Splits one output; as `ReasoningSplitter`, but that reasoning may come again. The head of a call is content."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ends inside the reasoning."""
        self._held = ""
        self._kind: Kind | None = Kind.REASONING if is_open else None
        """Of the message's text; None in a head."""
        self._is_first = not is_open
        self._is_call = False

    @property
    def reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._kind is Kind.REASONING

    def push(self, text: str) -> Iterator[Piece]:
        """The pieces that are certain now."""
        self._held += text
        more = True
        while more and self._held:
            before = len(self._held), self._kind
            yield from self._head() if self._kind is None else self._text(self._kind)
            more = before != (len(self._held), self._kind)

    def finish(self) -> Iterator[Piece]:
        """What was held back, when the output has ended: a head without a text is none."""
        yield from self._take(self._kind or Kind.MARK, len(self._held))

    def _head(self) -> Iterator[Piece]:
        if self._is_first and not any(_agree(self._held, head) for head in _HEADS):
            self._kind, self._is_first = Kind.CONTENT, False
            return
        if (place := self._held.find(MESSAGE, 0, MAX_HEAD_CHARS)) >= 0:
            yield from self._opened(self._held[:place])
        elif len(self._held) >= MAX_HEAD_CHARS:
            yield from self._take(Kind.CONTENT, 1)
            self._kind = Kind.CONTENT

    def _opened(self, head: str) -> Iterator[Piece]:
        """The text of a message begins."""
        self._is_first = False
        channel = re.split(r"[\s<]", head.partition(CHANNEL)[2], maxsplit=1)[0]
        plain = head.replace(CHANNEL, " ").replace(CONSTRAIN, " ").replace(START, " ")
        found = _RECIPIENT.search(plain)
        recipient = found["who"] if found else ""
        size = len(head) + len(MESSAGE)
        if recipient.startswith("functions."):
            begin = min(place for mark in (CHANNEL, FUNCTION) if (place := head.find(mark)) >= 0)
            yield from self._take(Kind.MARK, begin)
            yield from self._take(Kind.CONTENT, size - begin)
            self._kind, self._is_call = Kind.CONTENT, True
            return
        yield from self._take(Kind.MARK, size)
        # what is for a tool of the model's own, which nobody runs here, is no answer
        self._kind = Kind.REASONING if channel == "analysis" or recipient else Kind.CONTENT

    def _text(self, kind: Kind) -> Iterator[Piece]:
        places = [(place, mark) for mark in _BEHIND if (place := self._held.find(mark)) >= 0]
        if not places:
            yield from self._take(kind, len(self._held) - max(begun(self._held, mark) for mark in _BEHIND))
            return
        place, mark = min(places)
        yield from self._take(kind, place)
        if mark not in (START, CHANNEL):
            yield from self._take(Kind.CONTENT if self._is_call else Kind.MARK, len(mark))
        self._kind, self._is_call = None, False

    def _take(self, kind: Kind, size: int) -> Iterator[Piece]:
        taken, self._held = self._held[:size], self._held[size:]
        if taken:
            yield kind, taken


def _agree(text: str, head: str) -> bool:
    """Whether one begins with the other."""
    return text.startswith(head) or head.startswith(text)
