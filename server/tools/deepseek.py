"""DeepSeek's calls. API process. Pure. In V3 and R1:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

and since V3.1 `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜`.
"""

from server.tools.json_steps import arguments
from server.tools.steps import Step, closing, content_until, head_until, next_char
from server.tools.writer import CallDraft, CallWriter, Malformed

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_KIND, FENCE, _FENCE_END = "function", "```json", "```"


def wrap_fenced(name: str) -> tuple[str, str]:
    """What stands around a call's arguments in V3 and R1."""
    return f"{ALL_BEGIN}{BEGIN}{_KIND}{SEPARATOR}{name}\n{FENCE}\n", f"\n{_FENCE_END}{END}{ALL_END}"


def wrap(name: str) -> tuple[str, str]:
    """What stands around a call's arguments since V3.1."""
    return f"{ALL_BEGIN}{BEGIN}{name}{SEPARATOR}", f"{END}{ALL_END}"


def deepseek(writer: CallWriter) -> Step[None]:
    """Reads an output; never returns."""
    while True:
        marker = yield from content_until(writer, ALL_BEGIN, BEGIN, ALL_END)
        if marker == BEGIN:
            yield from _call(writer)
        else:
            writer.clear()


def _call(writer: CallWriter) -> Step[None]:
    name, _ = yield from head_until(SEPARATOR)
    char = yield from next_char()
    is_fenced = name.strip() == _KIND and char != "{"
    if is_fenced:
        name, _ = yield from head_until(FENCE, first=char)
        char = yield from next_char()
    draft = CallDraft(writer)
    draft.named(name.strip())
    if char != "{":
        raise Malformed
    yield from arguments(char, draft)
    draft.close()
    if is_fenced:
        yield from closing(writer, _FENCE_END)
    yield from closing(writer, END)
