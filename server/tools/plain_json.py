"""Calls as plain JSON: an output that is `{"name": "f", "arguments": {}}` or an array of such objects.

What models without a format of their own are asked for, and what a grammar makes any model write. API process. Pure.
"""

from collections.abc import Callable

from server.tools.json_steps import arguments, call_array, call_objects
from server.tools.steps import Step, content_until, next_char
from server.tools.writer import CallDraft, CallWriter


def plain_json(writer: CallWriter) -> Step[None]:
    """Reads an output; never returns."""
    while True:
        marker = yield from content_until(writer, "[", "{")
        if not writer.is_blank:
            writer.release()
        elif marker == "[":
            yield from call_array(writer)
        else:
            yield from call_objects(writer, marker)


def arguments_of(name: str) -> Callable[[CallWriter], Step[None]]:
    """A format whose outputs are the arguments of one call of this function."""

    def read(writer: CallWriter) -> Step[None]:
        if writer.is_blank:
            draft = CallDraft(writer)
            draft.named(name)
            yield from arguments((yield from next_char()), draft)
            draft.close()
        while True:
            yield from content_until(writer)

    return read
