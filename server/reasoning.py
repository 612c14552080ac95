"""Tells what a model thinks from what it answers, in text that comes in pieces.

The marks come from the chat template, once at start (`marks_of`); a splitter is made for each choice by
`server/output.py`. API process. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarks:
    """What stands before and after a model's reasoning."""

    begin: str
    end: str
    answer: str = ""
    """What stands before an answer, whether there was reasoning or not, where outputs are messages in channels
    (`server/channels.py`)."""
    tokens: tuple[str, ...] = ()
    """What may be special tokens, where these are others than `begin` and `end`."""
    closers: tuple[str, ...] = ()
    """What ends an answer, and then its message, where both are sections of which the prompt opens the first
    (`server/xtml.py`). Calls follow the answer, if only an empty one."""


_KNOWN = (
    ReasoningMarks(begin="<think>", end="</think>"),
    ReasoningMarks(begin="[THINK]", end="[/THINK]"),
    ReasoningMarks(
        begin="<|channel|>analysis<|message|>",
        end="<|end|><|start|>assistant",
        answer="<|channel|>final<|message|>",
        tokens=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
)


def marks_of(template: str) -> ReasoningMarks | None:
    """The marks that the chat template knows; None for a model that does not reason."""
    return next((marks for marks in _KNOWN if (marks.begin if marks.answer else marks.end) in template), None)


def is_open(marks: ReasoningMarks | None, prompt: str, started: str) -> bool:
    """Whether an answer to the prompt begins inside the reasoning. `started` is the text of the message that the answer
    goes on with, "" where there is none."""
    if marks is None:
        return False
    return prompt.rstrip().endswith(marks.begin) or started.rfind(marks.begin) > started.rfind(marks.end)


class Kind(Enum):
    """What a piece of an output is."""

    REASONING = auto()
    CONTENT = auto()
    MARK = auto()
    """A mark, or the white space around it: shown to nobody."""


Piece = tuple[Kind, str]


def begun(text: str, mark: str) -> int:
    """How many characters at the end of the text may be the beginning of the mark."""
    longest = min(len(mark) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


class ReasoningSplitter:
    """Splits one output; reasoning stands at its beginning or nowhere. Every character comes out once and in order, and
    the same however the text is cut into pushes. White space at the ends of the reasoning and before the content
    belongs to the marks."""

    def __init__(self, marks: ReasoningMarks, *, is_open: bool) -> None:
        """`is_open`: the prompt ends inside the reasoning."""
        self._marks = marks
        self._step = self._reason if is_open else self._begin
        self._held = ""
        """Text of which it is not decided yet what it is."""
        self._is_blank = True
        """Of the current part nothing but white space has come."""
        self._may_repeat = is_open
        """Some models repeat the mark with which their prompt ends."""

    @property
    def reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._step == self._reason

    def push(self, text: str) -> Iterator[Piece]:
        """The pieces that are certain now."""
        self._held += text
        step = None
        while step != self._step:
            step = self._step
            yield from step()

    def finish(self) -> Iterator[Piece]:
        """What was held back, when the output has ended."""
        if not self.reasoning:
            yield from self._take(Kind.CONTENT, len(self._held))
        yield from self._take(Kind.REASONING, len(self._held.rstrip()))
        yield from self._take(Kind.MARK, len(self._held))

    def _begin(self) -> Iterator[Piece]:
        """An output reasons when it begins with the mark, after white space at most."""
        begin, start = self._marks.begin, self._held.lstrip()
        if start.startswith(begin):
            yield from self._take(Kind.MARK, len(self._held) - len(start) + len(begin))
            self._step = self._reason
        elif not begin.startswith(start):
            self._step, self._is_blank = self._answer, False

    def _reason(self) -> Iterator[Piece]:
        begin, end = self._marks.begin, self._marks.end
        if self._is_blank:
            yield from self._skip_space()
            if self._may_repeat and self._held.startswith(begin):
                self._may_repeat = False
                yield from self._take(Kind.MARK, len(begin))
                yield from self._skip_space()
            if not self._held or (self._may_repeat and begin.startswith(self._held)):
                return
            self._is_blank = False
        position = self._held.find(end)
        certain = self._certain(end) if position < 0 else len(self._held[:position].rstrip())
        yield from self._take(Kind.REASONING, certain)
        if position >= 0:
            yield from self._take(Kind.MARK, position - certain + len(end))
            self._step, self._is_blank = self._answer, True

    def _answer(self) -> Iterator[Piece]:
        if self._is_blank:
            yield from self._skip_space()
            self._is_blank = not self._held
        yield from self._take(Kind.CONTENT, len(self._held))

    def _certain(self, mark: str) -> int:
        """Length of what is neither the beginning of the mark nor white space before it."""
        return len(self._held[: len(self._held) - begun(self._held, mark)].rstrip())

    def _skip_space(self) -> Iterator[Piece]:
        return self._take(Kind.MARK, len(self._held) - len(self._held.lstrip()))

    def _take(self, kind: Kind, size: int) -> Iterator[Piece]:
        taken, self._held = self._held[:size], self._held[size:]
        if taken:
            yield kind, taken
