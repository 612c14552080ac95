"""Llama 3's calls: an output that is `{"name": "f", "parameters": {}}`, several with semicolons between them, or such
objects after <|python_tag|>. API process. Pure."""

from server.tools.json_steps import call_objects
from server.tools.steps import Step, content_until, next_char
from server.tools.writer import CallWriter

TAG = "<|python_tag|>"


def wrap(name: str) -> tuple[str, str]:
    """What stands around a call's arguments."""
    return f'{{"name": "{name}", "parameters": ', "}"


def llama(writer: CallWriter) -> Step[None]:
    """Reads an output; never returns."""
    while True:
        marker = yield from content_until(writer, TAG, "{")
        if marker == TAG:
            yield from call_objects(writer, (yield from next_char()))
        if writer.is_blank:
            yield from call_objects(writer, marker)
        writer.release()
