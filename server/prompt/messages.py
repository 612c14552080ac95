"""Chat messages in the form that templates know. Used by `server/prompt/build.py`; API process. Pure."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from server.errors import BadRequest
from server.prompt.special import protect_all

Message = Mapping[str, object]
Protect = Callable[[str], str]

ROLES = ("system", "developer", "user", "assistant", "tool")

_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
_PART_NAMES = {"image_url": "images", "input_audio": "audio", "video_url": "videos", "file": "files"}


def texts_of(message: Message) -> Iterator[str]:
    """Every text of the message that `plain_message` would pass on, as the request has it."""
    content, calls = message.get("content"), message.get("tool_calls")
    parts = [] if isinstance(content, str) or not isinstance(content, Sequence) else content
    values = [
        content,
        *(part.get("text") for part in parts if isinstance(part, Mapping)),
        *map(message.get, _TEXT_FIELDS),
    ]
    for call in calls if isinstance(calls, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            values += [call.get("id"), function.get("name"), function.get("arguments")]
    yield from (value for value in values if isinstance(value, str))


def plain_message(
    message: Message, where: str, *, protect: Protect, takes_parts: bool, knows_developer: bool
) -> dict[str, object]:
    """The message without empty fields, each string of the user's protected. The content becomes one string (text parts
    are joined by newlines), in a list of one part where the template `takes_parts`; role `developer` becomes `system`
    unless the template knows it. `where` names the message in errors. Raises BadRequest."""
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}.", param="messages")
    if role == "developer" and not knows_developer:
        role = "system"
    text = _text_of(message.get("content"), f"{where}.content", protect)
    plain: dict[str, object] = {"role": role, "content": [{"type": "text", "text": text}] if takes_parts else text}
    for key in _TEXT_FIELDS:
        if (value := message.get(key)) is not None:
            plain[key] = protect(_string(value, f"{where}.{key}"))
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and calls:
        plain["tool_calls"] = [_plain_call(call, f"{where}.tool_calls", protect) for call in calls]
    return plain


def _text_of(content: object, where: str, protect: Protect) -> str:
    """Parts are protected one by one, so that none completes what another begins."""
    if content is None:
        return ""
    if isinstance(content, str):
        return protect(content)
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where} must be a string or a list of parts.", param="messages")
    return "\n".join(protect(_part_text(part, f"{where}[{index}]")) for index, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise BadRequest(f"{where} must be an object with a type.", param="messages")
    kind, text = part.get("type"), part.get("text")
    if kind in _PART_NAMES:
        raise BadRequest(f"{where}: this model does not accept {_PART_NAMES[kind]}.", param="messages")
    if kind != "text":
        raise BadRequest(f"{where}: parts of type {str(kind)[:40]!r} are not supported.", param="messages")
    return _string(text, f"{where}.text")


def _plain_call(call: object, where: str, protect: Protect) -> dict[str, object]:
    """A tool call as templates know it: `arguments` is an object, where the API has its JSON text. An escaped lone
    surrogate in it, which no tokenizer takes, makes it invalid."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise BadRequest(f"{where}: each call must hold a function.", param="messages")
    try:
        arguments = json.loads(_string(function.get("arguments") or "{}", f"{where}: function.arguments"))
        json.dumps(arguments, ensure_ascii=False).encode()
    except ValueError:
        raise BadRequest(f"{where}: function.arguments must be JSON.", param="messages") from None
    name = _string(function.get("name"), f"{where}: function.name")
    return {
        "id": protect(_string(call.get("id") or "", f"{where}: id")),
        "type": "function",
        "function": {"name": protect(name), "arguments": protect_all(arguments, protect)},
    }


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where} must be a string.", param="messages")
    return value
