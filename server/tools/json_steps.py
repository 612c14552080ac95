"""Steps that read JSON, strictly, and pass it on as it comes. Used by the formats beside it; API process. Pure."""

import json
import re
from typing import NoReturn

from server.tools.steps import Put, Step, next_char
from server.tools.writer import CallDraft, CallWriter, Malformed

MAX_DEPTH = 64
MAX_ATOM_CHARS = 128
_CLOSERS = {"{": "}", "[": "]"}
_ATOM = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null", re.ASCII)
_ATOM_CHARS = frozenset("+-.0123456789Eaeflnrstu")
_HEX = frozenset("0123456789abcdefABCDEF")
_HIGH = re.compile(r"\\u[dD][89abAB]..")
_LOW = re.compile(r"\\u[dD][c-fC-F]..")
_LONE = "\\ufffd"
"""Instead of half a surrogate pair, which no text can hold."""
_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "type")


def value(char: str, put: Put) -> Step[str]:
    """One JSON value that begins with `char`. Its text goes to `put`, without white space between tokens; what models
    write in strings and no text may hold is mended: control characters are escaped, lone surrogates replaced. Returns
    the character that follows where that had to be read, else ""."""
    closers: list[str] = []
    while True:
        if char == '"':
            yield from _string(put)
            char = ""
        elif char in _CLOSERS:
            if len(closers) == MAX_DEPTH:
                raise Malformed
            put(char)
            closers.append(_CLOSERS[char])
            char = yield from next_char()
            if char != closers[-1]:
                char = yield from _item(char, closers, put)
                continue
        else:
            char = yield from _atom(char, put)
        char = yield from _after_value(char, closers, put)
        if not closers:
            return char


def _after_value(char: str, closers: list[str], put: Put) -> Step[str]:
    """The end of a value: of the containers that it ends, and a comma. Returns the first character of the next value;
    where there is none, what `value` returns."""
    while closers:
        if not char or char.isspace():
            char = yield from next_char()
        if char == ",":
            put(char)
            return (yield from _item((yield from next_char()), closers, put))
        if char != closers.pop():
            raise Malformed
        put(char)
        char = ""
    return char


def _item(char: str, closers: list[str], put: Put) -> Step[str]:
    """The key of an item, if it must have one. Returns the first character of its value."""
    if closers[-1] == "]":
        return char
    if char != '"':
        raise Malformed
    yield from _string(put)
    if (yield from next_char()) != ":":
        raise Malformed
    put(":")
    return (yield from next_char())


def _string(put: Put) -> Step[None]:
    """After the quotation mark that opens it."""
    put('"')
    high = ""
    while (char := (yield)) != '"':
        text = yield from _spelled(char)
        is_low = _LOW.fullmatch(text) is not None
        if high:
            put(high if is_low else _LONE)
        elif is_low:
            text = _LONE
        high = text if _HIGH.fullmatch(text) else ""
        if not high:
            put(text)
    put((_LONE if high else "") + '"')


def _spelled(char: str) -> Step[str]:
    """A character inside a string, as JSON spells it; half of a pair where that is how it is escaped."""
    if char != "\\":
        return char if char >= " " else json.dumps(char)[1:-1]
    char = yield
    if char not in '"\\/bfnrtu':
        raise Malformed
    text = "\\" + char
    for _ in range(4 if char == "u" else 0):
        digit = yield
        if digit not in _HEX:
            raise Malformed
        text += digit
    return text


def _atom(char: str, put: Put) -> Step[str]:
    """A number or a name. Returns the character behind it."""
    text = ""
    while char in _ATOM_CHARS and len(text) < MAX_ATOM_CHARS:
        text += char
        char = yield
    if not _ATOM.fullmatch(text):
        raise Malformed
    put(text)
    return char


def string(char: str) -> Step[str]:
    """A string that begins with `char`."""
    if char != '"':
        raise Malformed
    pieces: list[str] = []
    yield from _string(pieces.append)
    return str(json.loads("".join(pieces)))


def arguments(char: str, draft: CallDraft) -> Step[str]:
    """A call's arguments: an object, the text of one in a string, or null for none."""
    if char == "{":
        return (yield from value(char, draft.put))
    if char == '"':
        draft.put(_object_in((yield from string(char))))
        return ""
    pieces: list[str] = []
    char = yield from value(char, pieces.append)
    if pieces != ["null"]:
        raise Malformed
    return char


def _object_in(text: str) -> str:
    found = whole(text)
    if not found.startswith("{"):
        raise Malformed
    return found


def whole(text: str) -> str:
    """The text of one JSON value, by the rules of `value`. Raises Malformed where it is anything else."""
    pieces: list[str] = []
    chars = iter(text.strip() + " ")  # a number ends with what follows it
    steps = value(next(chars), pieces.append)
    try:
        next(steps)
        for char in chars:
            steps.send(char)
    except StopIteration as end:
        if (end.value + "".join(chars)).strip():
            raise Malformed from None
        return "".join(pieces)
    raise Malformed


def call_object(writer: CallWriter, char: str) -> Step[None]:
    """A call as an object with `name` and `arguments` (or `parameters`), in any order."""
    if char != "{":
        raise Malformed
    draft, seen = CallDraft(writer), set[str]()
    while char != "}":
        key = yield from string((yield from next_char()))
        key = _ARGUMENTS[0] if key in _ARGUMENTS else key
        if key in seen or (yield from next_char()) != ":":
            raise Malformed
        seen.add(key)
        char = (yield from _field(key, draft)) or " "
        char = (yield from next_char()) if char.isspace() else char
        if char not in ("}", ","):
            raise Malformed
    draft.close()


def _field(key: str, draft: CallDraft) -> Step[str]:
    """The value of a call's field, and what follows it as in `value`. Of other objects than calls this stops early."""
    char = yield from next_char()
    if key == "name":
        draft.named((yield from string(char)))
        return ""
    if key == _ARGUMENTS[0]:
        return (yield from arguments(char, draft))
    if key in _IGNORED:
        return (yield from value(char, lambda _: None))
    raise Malformed


def call_array(writer: CallWriter) -> Step[None]:
    """Calls in an array, after the bracket that opens it."""
    char = ","
    while char == ",":
        yield from call_object(writer, (yield from next_char()))
        writer.is_markup = True
        char = yield from next_char()
    if char != "]":
        raise Malformed
    writer.clear()


def call_objects(writer: CallWriter, char: str) -> Step[NoReturn]:
    """Calls one after the other, the first of which begins with `char`; a semicolon or a comma may stand between."""
    while True:
        yield from call_object(writer, char)
        writer.is_markup = True
        char = yield from next_char()
        if char in (";", ","):
            char = yield from next_char()
        if char != "{":
            raise Malformed
