"""Steps that parsers of tool calls are made of: generators that are sent one character at a time.

So a format is written as if the whole text were there, and gives the same however the text is cut. Used by the formats
of this package; API process. Pure.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

from server.tools.writer import CallWriter, Malformed

T = TypeVar("T")
Step = Generator[None, str, T]
"""Reads characters, then returns a T. Raises Malformed where the text is not what it must be."""
Put = Callable[[str], object]

MAX_HEAD_CHARS = 512
"""Of what stands before a call's arguments, such as its name."""


def next_char() -> Step[str]:
    """The next character that is not white space."""
    while (char := (yield)).isspace():
        pass
    return char


def _begins(text: str, markers: tuple[str, ...]) -> bool:
    """Whether one of the markers begins with the text."""
    return any(marker.startswith(text) for marker in markers)


def content_until(writer: CallWriter, *markers: str) -> Step[str]:
    """Everything is content up to one of the markers, which is returned; white space before it belongs to it. No marker
    is the beginning of another."""
    heads = {marker[0] for marker in markers}
    spaces, begun = 0, ""
    while True:
        begun += yield
        while begun and not (begun[0] in heads and _begins(begun, markers)):
            first, begun = begun[0], begun[1:]
            spaces = spaces + 1 if first.isspace() else 0
            if not spaces:
                writer.release(keep=len(begun))
        if begun in markers:
            return begun


def text_until(put: Put, *markers: str, first: str = "") -> Step[str]:
    """Every character goes to `put`, `first` before those to come, up to one of the markers, which is returned. No
    marker is the beginning of another."""
    heads = {marker[0] for marker in markers}
    begun = first
    while True:
        while begun and not (begun[0] in heads and _begins(begun, markers)):
            put(begun[0])
            begun = begun[1:]
        if begun in markers:
            return begun
        begun += yield


def head_until(*markers: str, first: str = "") -> Step[tuple[str, str]]:
    """(a short text, the marker that ended it)"""
    chars: list[str] = []

    def put(char: str) -> None:
        if len(chars) == MAX_HEAD_CHARS:
            raise Malformed
        chars.append(char)

    marker = yield from text_until(put, *markers, first=first)
    return "".join(chars), marker


def one_of(*markers: str) -> Step[str]:
    """White space, then one of the markers, which is returned."""
    begun = yield from next_char()
    while begun not in markers:
        if not _begins(begun, markers):
            raise Malformed
        begun += yield
    return begun


def closing(writer: CallWriter, end: str, *begins: str) -> Step[str]:
    """`one_of`, of a call that is complete: what comes of the end mark is markup, and nothing if the output ends. Where
    it is missing another call may begin, which may yet prove to be content."""
    writer.is_markup = True
    marker = yield from one_of(end, *begins)
    if marker == end:
        writer.clear()
    writer.is_markup = False
    return marker
