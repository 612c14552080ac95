"""GLM-4.5's calls. API process. Pure.

<tool_call>f
<arg_key>key</arg_key>
<arg_value>value</arg_value>
</tool_call>
"""

from server.tools.parameters import Parameters, key_until
from server.tools.steps import Step, content_until, head_until, one_of
from server.tools.writer import CallWriter

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


def glm(writer: CallWriter) -> Step[None]:
    """Reads an output; never returns."""
    while True:
        yield from content_until(writer, BEGIN)
        name, marker = yield from head_until(KEY, END)
        parameters = Parameters(writer, name.strip())
        while marker == KEY:
            key = yield from key_until(KEY_END)
            yield from one_of(VALUE)
            yield from parameters.read(key, VALUE_END)
            marker = yield from one_of(KEY, END)
        parameters.close()
