"""Mistral's calls: `[TOOL_CALLS][{"name": "f", "arguments": {}}]`, in newer models `[TOOL_CALLS]f[ARGS]{}` for each
call (with `[CALL_ID]` and an id after the name in some). API process. Pure."""

from server.tools.json_steps import arguments, call_array
from server.tools.steps import Step, content_until, head_until, next_char
from server.tools.writer import CallDraft, CallWriter, Malformed

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def wrap(name: str) -> tuple[str, str]:
    """What stands around a call's arguments."""
    return f'{BEGIN}[{{"name": "{name}", "arguments": ', "}]"


def mistral(writer: CallWriter) -> Step[None]:
    """Reads an output; never returns."""
    while True:
        yield from content_until(writer, BEGIN)
        first = yield from next_char()
        if first == "[":
            yield from call_array(writer)
        else:
            yield from _named(writer, first)


def _named(writer: CallWriter, first: str) -> Step[None]:
    name, marker = yield from head_until(ID, ARGUMENTS, "{", first=first)
    draft = CallDraft(writer)
    draft.named(name.strip())
    if marker == ID:
        yield from head_until(ARGUMENTS)
    char = marker if marker == "{" else (yield from next_char())
    if char != "{":
        raise Malformed
    yield from arguments(char, draft)
    draft.close()
