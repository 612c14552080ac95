"""Calls as plain JSON: an output that is `{"name": "f", "arguments": {}}`, several of them, or an array of them.

What models without a format of their own are asked for, and those made to write whose own format is no JSON. API
process. Pure.
"""

from server.tools.json_steps import call_array, call_objects
from server.tools.steps import Step, content_until
from server.tools.writer import CallWriter


def wrap(name: str) -> tuple[str, str]:
    """What stands around a call's arguments."""
    return f'{{"name": "{name}", "arguments": ', "}"


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
