"""Sorts the output of a model that writes messages in sections, as Kimi K3 does (Moonshot's XTML): what it thinks, what
it answers, and calls, which are left to `server/tools/xtml.py`. Used by `server/output.py`; API process. Pure.

    hm<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>

The prompt has opened the first section (`server/prompt/xtml.py`). Marks are looked for in the text, so those that a
model spells in ordinary tokens are marks, too: a text about the format cannot be told from one in it.
"""

from collections.abc import Iterator
from enum import Enum, auto
from types import MappingProxyType

from server.reasoning import Kind, Piece, ReasoningMarks, begun

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
THINK, THINK_END = f"{OPEN}think{SEP}", f"{CLOSE}think{SEP}"
RESPONSE, RESPONSE_END = f"{OPEN}response{SEP}", f"{CLOSE}response{SEP}"
TOOLS, TOOLS_END = f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}"
MESSAGE, MESSAGE_END = f'{OPEN}message role="assistant"{SEP}', f"{CLOSE}message{SEP}"

MARKS = ReasoningMarks(
    begin=THINK, end=THINK_END, answer=RESPONSE, tokens=(OPEN, CLOSE, SEP), closers=(RESPONSE_END, MESSAGE_END)
)


class _Section(Enum):
    """Where in a message a text stands."""

    THINK = auto()
    RESPONSE = auto()
    TOOLS = auto()
    NONE = auto()
    """Between sections: white space is nothing, and other text an answer that was not opened."""


_LEADS_TO = MappingProxyType(
    {
        THINK: _Section.THINK,
        RESPONSE: _Section.RESPONSE,
        TOOLS: _Section.TOOLS,
        MESSAGE: _Section.NONE,
        **dict.fromkeys((THINK_END, RESPONSE_END, TOOLS_END, MESSAGE_END, END), _Section.NONE),
    }
)
"""Mark -> the section behind it. Any mark ends any section: models forget to close one before the next."""
_IN_TOOLS = (TOOLS_END, END)
"""Arguments may hold the others."""


class SectionSplitter:
    """Splits one output; as `ReasoningSplitter`, but that white space belongs to the sections that it stands in. Calls
    are content, their marks included."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ends inside the reasoning."""
        self._held = ""
        self._section = _Section.THINK if is_open else _Section.RESPONSE

    @property
    def reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._section is _Section.THINK

    def push(self, text: str) -> Iterator[Piece]:
        """The pieces that are certain now."""
        self._held += text
        while places := [(place, mark) for mark in self._marks() if (place := self._held.find(mark)) >= 0]:
            place, mark = min(places)
            yield from self._text(place)
            yield from self._take(Kind.CONTENT if mark in (TOOLS, TOOLS_END) else Kind.MARK, len(mark))
            self._section = _LEADS_TO[mark]
        yield from self._text(len(self._held) - max(begun(self._held, mark) for mark in self._marks()))

    def finish(self) -> Iterator[Piece]:
        """What was held back, when the output has ended: the beginning of a tag is none."""
        if self._held.startswith((OPEN, CLOSE)):
            yield from self._take(Kind.MARK, len(self._held))
        yield from self._text(len(self._held))

    def _marks(self) -> tuple[str, ...]:
        return _IN_TOOLS if self._section is _Section.TOOLS else tuple(_LEADS_TO)

    def _text(self, size: int) -> Iterator[Piece]:
        if self._section is _Section.NONE:
            spaces = size - len(self._held[:size].lstrip())
            yield from self._take(Kind.MARK, spaces)
            size -= spaces
            self._section = _Section.RESPONSE if size else self._section
        yield from self._take(Kind.REASONING if self.reasoning else Kind.CONTENT, size)

    def _take(self, kind: Kind, size: int) -> Iterator[Piece]:
        taken, self._held = self._held[:size], self._held[size:]
        if taken:
            yield kind, taken
