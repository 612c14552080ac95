"""GPT-OSS's calls, of whose output `server/channels.py` takes the rest apart. API process. Pure.

<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
"""

from server.channels import CALL, CHANNEL, CONSTRAIN, END, FUNCTION, MESSAGE
from server.tools.json_steps import arguments
from server.tools.steps import Step, content_until, head_until, next_char, one_of
from server.tools.writer import CallDraft, CallWriter, Malformed


def wrap(name: str) -> tuple[str, str]:
    """What stands around a call's arguments."""
    return f"{CHANNEL}commentary {FUNCTION}{name} {CONSTRAIN}json{MESSAGE}", CALL


def harmony(writer: CallWriter) -> Step[None]:
    """Reads an output; never returns."""
    while True:
        marker = yield from content_until(writer, CHANNEL, FUNCTION)
        head, _ = yield from head_until(MESSAGE)
        yield from _call(writer, head if marker == FUNCTION else head.partition(FUNCTION)[2])


def _call(writer: CallWriter, head: str) -> Step[None]:
    draft = CallDraft(writer)
    draft.named(head.replace("<", " ").split(maxsplit=1)[0] if head.strip() else "")
    char = yield from next_char()
    if char != "{":
        raise Malformed
    yield from arguments(char, draft)
    draft.close()
    writer.is_markup = True
    yield from one_of(CALL, END)
    writer.clear()
