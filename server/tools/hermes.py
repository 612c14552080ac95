"""Hermes' and Qwen's calls: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`. API process. Pure.

Small models forget the mark at the end of a call that another follows.
"""

from server.tools.json_steps import call_object
from server.tools.steps import Step, closing, content_until, next_char
from server.tools.writer import CallWriter

BEGIN, END = "<tool_call>", "</tool_call>"


def wrap(name: str) -> tuple[str, str]:
    """What stands around a call's arguments."""
    return f'{BEGIN}\n{{"name": "{name}", "arguments": ', f"}}\n{END}"


def hermes(writer: CallWriter) -> Step[None]:
    """Reads an output; never returns."""
    while True:
        marker = yield from content_until(writer, BEGIN)
        while marker == BEGIN:
            yield from call_object(writer, (yield from next_char()))
            marker = yield from closing(writer, END, BEGIN)
