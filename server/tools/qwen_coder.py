"""Qwen3-Coder's calls. API process. Pure.

    <tool_call>
    <function=f>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

A line break at each end of a value belongs to the tags. Some checkpoints leave out one of the outer tags, or both.
"""

from server.tools.parameters import Parameters, key_until
from server.tools.steps import Step, closing, content_until, head_until, one_of
from server.tools.writer import CallWriter

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def qwen_coder(writer: CallWriter) -> Step[None]:
    """Reads an output; never returns."""
    while True:
        marker = yield from content_until(writer, BEGIN, FUNCTION)
        while marker != END:
            if marker == BEGIN:
                yield from one_of(FUNCTION)
            yield from _call(writer)
            marker = yield from closing(writer, END, BEGIN, FUNCTION)


def _call(writer: CallWriter) -> Step[None]:
    name, _ = yield from head_until(">")
    parameters = Parameters(writer, name.strip())
    while (yield from one_of(PARAMETER, FUNCTION_END)) == PARAMETER:
        key = yield from key_until(">")
        first = yield
        yield from parameters.read(key, "\n" + PARAMETER_END, PARAMETER_END, first="" if first == "\n" else first)
    parameters.close()
