"""What the text of an output consists of: reasoning, content, tool calls. The pipeline is

    text -> reasoning splitter -> stop strings (of what is not reasoning) -> tool parser -> parts

of small pure objects, each of which gives the same however the text is cut into pushes. Made and fed by
`server/choice.py`, one reader per choice; API process.
"""

from dataclasses import dataclass, field

from server.channels import ChannelSplitter
from server.detokenize import StopFilter
from server.reasoning import Kind, Piece, ReasoningMarks, ReasoningSplitter
from server.tools.calls import AnswerPart
from server.tools.plain_json import plain_json
from server.tools.reader import Format, ToolReader
from server.tools.use import ToolUse
from server.xtml import SectionSplitter


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How the text of a request's outputs is to be read."""

    reasoning: ReasoningMarks | None = None
    """None: nothing in the text is reasoning."""
    is_reasoning: bool = False
    """The prompt ends inside the reasoning."""
    shows_reasoning: bool = True
    markup_ids: frozenset[int] = frozenset()
    """Special tokens that belong to the text, since they are marks."""
    tools: ToolUse | None = None
    """None: nothing in the text is a call."""
    format: Format = plain_json
    """Of calls."""


PLAIN = OutputForm()


@dataclass(slots=True)
class Parts:
    """What one step added to an output."""

    reasoning: str = ""
    answer: list[AnswerPart] = field(default_factory=list)
    text_bytes: int = 0
    """Bytes of the text that is decided: of all that the model wrote, marks included, unless a stop string cut it."""


def _splitter(marks: ReasoningMarks, *, is_open: bool) -> ReasoningSplitter | ChannelSplitter | SectionSplitter:
    if marks.closers:
        return SectionSplitter(is_open=is_open)
    return ChannelSplitter(is_open=is_open) if marks.answer else ReasoningSplitter(marks, is_open=is_open)


class OutputReader:
    """Reads one output."""

    def __init__(self, form: OutputForm, stop: tuple[str, ...], include_stop: bool) -> None:
        self._form = form
        self._stop = StopFilter(stop, include_stop)
        self._may_stop = False
        """Whether the newest text may complete a stop string."""
        marks = form.reasoning
        self._splitter = None if marks is None else _splitter(marks, is_open=form.is_reasoning)
        tools = form.tools
        self._tools = None if tools is None else ToolReader(form.format, tools.functions, only_one=tools.only_one)
        self._parts = Parts()

    @property
    def is_over(self) -> bool:
        """Nothing that follows matters: a stop string came, or the only call."""
        return self.stopped is not None or (self._tools is not None and self._tools.is_over)

    @property
    def has_calls(self) -> bool:
        """The output is one that calls functions: there are calls, and all of them are complete."""
        return self._tools is not None and self._tools.has_calls

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the output."""
        return self._stop.stopped

    @property
    def reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._splitter is not None and self._splitter.reasoning

    def push(self, text: str, *, may_stop: bool) -> None:
        """Read on. After a stop string nothing changes any more."""
        self._may_stop = may_stop
        if self._splitter is None:
            self._answer(text)
            return
        for piece in self._splitter.push(text):
            self._sort(piece)

    def finish(self) -> None:
        """The output has ended."""
        for piece in self._splitter.finish() if self._splitter is not None else ():
            self._sort(piece)
        if self.stopped is None:
            self._content(self._stop.finish())
        if self._tools is not None:
            self._tools.finish()

    def take(self) -> Parts:
        """What is certain and was not taken before."""
        if self._tools is not None:
            self._parts.answer = self._tools.take()
        parts, self._parts = self._parts, Parts()
        return parts

    def _sort(self, piece: Piece) -> None:
        kind, text = piece
        if kind is Kind.CONTENT:
            self._answer(text)
        elif self.stopped is None:
            self._parts.text_bytes += len(text.encode())
            if kind is Kind.REASONING and self._form.shows_reasoning:
                self._parts.reasoning += text

    def _answer(self, text: str) -> None:
        self._content(self._stop.push(text, may_stop=self._may_stop))

    def _content(self, text: str) -> None:
        self._parts.text_bytes += len(text.encode())
        if self._tools is not None:
            self._tools.push(text)
        elif text:
            self._parts.answer.append(text)
