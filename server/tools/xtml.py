"""Kimi K3's calls, of whose output `server/xtml.py` takes the rest apart. API process. Pure.

    <|open|>tools<|sep|>
    <|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

without the line breaks. A value is its text where the type is `string`, else JSON. Arguments may also be JSON as a
whole, in a tag `json` in place of those called `argument`: forced calls are written so.
"""

import re

from server.tools.json_steps import arguments
from server.tools.parameters import Parameters
from server.tools.steps import Step, closing, content_until, head_until, next_char, one_of
from server.tools.writer import CallDraft, CallWriter, Malformed
from server.xtml import CLOSE, OPEN, SEP, TOOLS, TOOLS_END

CALL, CALL_END = f"{OPEN}call", f"{CLOSE}call{SEP}"
ARGUMENT, ARGUMENT_END = f"{OPEN}argument", f"{CLOSE}argument{SEP}"
JSON, JSON_END = f"{OPEN}json", f"{CLOSE}json{SEP}"
_ATTRIBUTE = re.compile(r'\s([a-z]+)="([^"]*)"')


def wrap(name: str) -> tuple[str, str]:
    """What stands around a call's arguments."""
    return (
        f'{TOOLS}{CALL} tool="{name}" index="1"{SEP}{JSON} type="object"{SEP}',
        f"{JSON_END}{CALL_END}{TOOLS_END}",
    )


def xtml(writer: CallWriter) -> Step[None]:
    """Reads an output; never returns."""
    while True:
        marker = yield from content_until(writer, TOOLS, CALL, TOOLS_END)
        if marker == CALL:
            yield from _call(writer)
        else:
            writer.clear()


def _call(writer: CallWriter) -> Step[None]:
    name = (yield from _attributes()).get("tool", "")
    marker = yield from one_of(ARGUMENT, JSON, CALL_END)
    if marker == JSON:
        yield from _json(writer, name)
        return
    parameters = Parameters(writer, name)
    while marker == ARGUMENT:
        given = yield from _attributes()
        if "key" not in given:
            raise Malformed
        yield from parameters.read(given["key"], ARGUMENT_END, types=_types(given.get("type")))
        marker = yield from one_of(ARGUMENT, CALL_END)
    parameters.close()


def _json(writer: CallWriter, name: str) -> Step[None]:
    yield from head_until(SEP)
    draft = CallDraft(writer)
    draft.named(name)
    char = yield from next_char()
    if char != "{":
        raise Malformed
    yield from arguments(char, draft)
    draft.close()
    yield from closing(writer, JSON_END)
    yield from closing(writer, CALL_END)


def _attributes() -> Step[dict[str, str]]:
    """Of a tag, up to its end."""
    head, _ = yield from head_until(SEP)
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(head)}


def _types(declared: str | None) -> set[str] | None:
    """Those that a value may have: what the model says of it goes before the schema."""
    if declared is None:
        return None
    return {"string"} if declared == "string" else set()
