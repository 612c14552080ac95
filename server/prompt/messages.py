"""Chat messages in the form that templates know. Used by `server/prompt/build.py` and its renderers;
API process. Pure."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from server.errors import BadRequest
from server.prompt.special import protect_all, strings_in

Message = Mapping[str, object]
Protect = Callable[[str], str]

ROLES = ("system", "developer", "user", "assistant", "tool")

_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
_IMAGE_ROLES = ("user", "tool")
_OTHER_IMAGES = ("image", "input_image")
"""How other APIs and templates call an image."""
_PART_NAMES = {
    "image_url": "images",
    **dict.fromkeys(_OTHER_IMAGES, "images"),
    "input_audio": "audio",
    "video_url": "videos",
    "file": "files",
}


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


def all_texts(messages: Sequence[Message], *values: object) -> list[str]:
    """Every text of a conversation, and of JSON values beside it."""
    return [*(text for message in messages for text in texts_of(message)), *strings_in(values)]


def image_urls(messages: Sequence[Message]) -> list[str]:
    """The URLs of all images, in order. Raises BadRequest for an image of a role that has none, or without a URL."""
    urls = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) or not isinstance(content, Sequence):
            continue
        for index, part in enumerate(content):
            if isinstance(part, Mapping) and part.get("type") == "image_url":
                where = f"messages[{number}].content[{index}]"
                if message.get("role") not in _IMAGE_ROLES:
                    roles = " and ".join(_IMAGE_ROLES)
                    raise BadRequest(f"{where}: only messages of role {roles} may hold images.", param="messages")
                image = part.get("image_url")
                url = image.get("url") if isinstance(image, Mapping) else image
                urls.append(_string(url, f"{where}.image_url.url"))
    return urls


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form in which a template takes messages."""

    takes_parts: bool = False
    """Content must be a list of parts; else it may be a string."""
    knows_developer: bool = False
    image_literal: str | None = None
    """What stands for an image in a string; None for a model that takes no images."""
    keeps_parts: bool = False
    """Content may be a list of parts, whatever the role."""
    shows_images: bool = False
    """A list of parts may hold images."""
    images_first: bool = False
    """In a string, before all text of the message, as LLaVA's own template has it: the template knows text alone."""
    reasoning_name: str = "reasoning_content"
    """What the template calls it. GPT-OSS's, which says `thinking`, refuses it beside both content and calls."""


def plain_message(message: Message, where: str, *, protect: Protect, form: Form) -> dict[str, object]:
    """The message without empty fields, each string of the user's protected. Where the form keeps parts, or images are
    shown and the role may have them, a list of parts stays one, with {"type": "image"} for each image; else the content
    is one string (parts are joined by newlines: many templates read the first part of a system message alone), in a
    list of one part where the template takes parts. Role `developer` becomes `system` unless the template knows it.
    `where` names the message in errors. Raises BadRequest."""
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}.", param="messages")
    if role == "developer" and not form.knows_developer:
        role = "system"
    keeps_parts = form.keeps_parts or (form.shows_images and role in _IMAGE_ROLES)
    content = _plain_content(message.get("content"), f"{where}.content", protect, form, keeps_parts)
    plain: dict[str, object] = {"role": role, "content": content}
    for key in _TEXT_FIELDS:
        if (value := message.get(key)) is not None:
            plain[key] = protect(_string(value, f"{where}.{key}"))
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and calls:
        plain["tool_calls"] = [_plain_call(call, f"{where}.tool_calls", protect) for call in calls]
    if form.reasoning_name != "reasoning_content" and (reasoning := plain.pop("reasoning_content", None)) is not None:
        plain |= {} if content and "tool_calls" in plain else {form.reasoning_name: reasoning}
    return plain


def _plain_content(
    content: object, where: str, protect: Protect, form: Form, keeps_parts: bool
) -> str | list[dict[str, str]]:
    """Parts are protected one by one, so that none completes what another begins."""
    if content is None:
        content = ""
    if isinstance(content, str):
        text = protect(content)
    elif isinstance(content, Sequence):
        parts = [_plain_part(part, f"{where}[{index}]", protect, form) for index, part in enumerate(content)]
        if keeps_parts and parts:
            return parts
        if form.images_first:
            parts.sort(key=lambda part: part["type"] != "image")
        text = "\n".join(part.get("text", form.image_literal or "") for part in parts)
    else:
        raise BadRequest(f"{where} must be a string or a list of parts.", param="messages")
    return [{"type": "text", "text": text}] if form.takes_parts else text


def _plain_part(part: object, where: str, protect: Protect, form: Form) -> dict[str, str]:
    if not isinstance(part, Mapping):
        raise BadRequest(f"{where} must be an object with a type.", param="messages")
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": protect(_string(part.get("text"), f"{where}.text"))}
    if kind == "image_url" and form.image_literal is not None:
        return {"type": "image"}
    if kind in _OTHER_IMAGES and form.image_literal is not None:
        wanted = "an image has the type 'image_url'"
        raise BadRequest(f"{where}: parts of type {kind!r} are not supported; {wanted}.", param="messages")
    if kind in _PART_NAMES:
        raise BadRequest(f"{where}: this model does not accept {_PART_NAMES[kind]}.", param="messages")
    raise BadRequest(f"{where}: parts of type {str(kind)[:40]!r} are not supported.", param="messages")


def _plain_call(call: object, where: str, protect: Protect) -> dict[str, object]:
    """A tool call as templates know it: `arguments` is an object, where the API has its JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise BadRequest(f"{where}: each call must hold a function.", param="messages")
    arguments = _arguments(_string(function.get("arguments") or "{}", f"{where}: function.arguments"))
    name = _string(function.get("name"), f"{where}: function.name")
    return {
        "id": protect(_string(call.get("id") or "", f"{where}: id")),
        "type": "function",
        "function": {"name": protect(name), "arguments": protect_all(arguments, protect)},
    }


def _arguments(text: str) -> object:
    """The object that the text is. Models write other things too, and clients send them back: those stay text, as does
    what a tokenizer or strict JSON cannot hold (an escaped lone surrogate, NaN)."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where} must be a string.", param="messages")
    return value
