"""Kimi K2's calls. API process. Pure.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>
<|tool_calls_section_end|>
"""

from server.tools.json_steps import arguments
from server.tools.steps import Step, closing, content_until, head_until, next_char
from server.tools.writer import CallDraft, CallWriter, Malformed

ALL_BEGIN, ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, SEPARATOR, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_PREFIX = "functions."


def wrap(name: str) -> tuple[str, str]:
    """What stands around a call's arguments."""
    return f"{ALL_BEGIN}{BEGIN}{_PREFIX}{name}:0{SEPARATOR}", f"{END}{ALL_END}"


def kimi(writer: CallWriter) -> Step[None]:
    """Reads an output; never returns."""
    while True:
        marker = yield from content_until(writer, ALL_BEGIN, BEGIN, ALL_END)
        if marker == BEGIN:
            yield from _call(writer)
        else:
            writer.clear()


def _call(writer: CallWriter) -> Step[None]:
    name, _ = yield from head_until(SEPARATOR)
    draft = CallDraft(writer)
    draft.named(name.strip().removeprefix(_PREFIX).partition(":")[0])
    char = yield from next_char()
    if char != "{":
        raise Malformed
    yield from arguments(char, draft)
    draft.close()
    yield from closing(writer, END)
