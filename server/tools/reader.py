"""Reads the tool calls in an output that comes in pieces. Used by `server/output.py`, one per choice; API process.

A format is a generator that is sent one character after the other (`server/tools/steps.py`), so the result cannot
depend on where the text was cut. What is no call of a function that the request has is content: text that only begins
like a call, other JSON, unknown functions. A call is passed on as it is written; should it turn out malformed after it
has begun, it stays incomplete, and the rest is content.
"""

from collections.abc import Callable

from server.tools.calls import AnswerPart
from server.tools.steps import Step
from server.tools.writer import CallWriter, Malformed, Tools

Format = Callable[[CallWriter], Step[None]]


class ToolReader:
    """Reads one output."""

    def __init__(self, format: Format, tools: Tools, *, only_one: bool = False) -> None:
        """With `only_one` the output is over after its first call."""
        self._format, self._only_one = format, only_one
        self._writer = CallWriter(tools)
        self._steps = self._started()

    @property
    def is_over(self) -> bool:
        """Nothing that follows is read."""
        return self._only_one and self._writer.calls > 0 and not self._writer.is_open

    @property
    def has_calls(self) -> bool:
        """There are calls, and every one that began is complete."""
        return self._writer.calls > 0 and not (self._writer.is_open or self._writer.is_broken)

    def push(self, text: str) -> None:
        """Read on."""
        for char in text:
            if self.is_over:
                break
            self._read(char)

    def finish(self) -> None:
        """The output has ended."""
        self._steps.close()
        self._writer.finish()

    def take(self) -> list[AnswerPart]:
        """The content and the pieces of calls that are certain and were not taken before."""
        return self._writer.take()

    def _read(self, char: str) -> None:
        self._writer.read(char)
        try:
            self._steps.send(char)
        except Malformed:
            self._writer.reject()
            self._steps = self._started()
            self._read(char)

    def _started(self) -> Step[None]:
        steps = self._format(self._writer)
        next(steps)
        return steps
