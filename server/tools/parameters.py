"""Arguments that a model writes one by one as text, made JSON by the schema of the function's parameters.

Used by the formats of this package whose calls are no JSON; API process. Pure.
"""

import json
from collections.abc import Mapping

from server.tools.json_steps import whole
from server.tools.steps import Step, head_until, text_until
from server.tools.writer import CallDraft, CallWriter, Malformed

_TYPES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),
    (str, ("string",)),
    (int, ("integer", "number")),
    (float, ("number",)),
    (dict, ("object",)),
    (list, ("array",)),
    (type(None), ("null",)),
)
"""Python's types of JSON values, and their names in schemas. `bool` is before `int`, which it is a kind of."""


class Parameters:
    """The arguments of one call."""

    def __init__(self, writer: CallWriter, name: str) -> None:
        """Raises Malformed for a function that the request does not have."""
        self._draft = CallDraft(writer)
        self._draft.named(name)
        declared = writer.tools[name].get("properties")
        self._declared = declared if isinstance(declared, Mapping) else {}
        self._seen: set[str] = set()

    def read(self, key: str, *ends: str, first: str = "", types: set[str] | None = None) -> Step[str]:
        """A value up to one of `ends`, which is returned. A string is passed on as it comes; anything else is one if it
        is no JSON of one of `types`, which are those that the schema allows where there are none. Raises Malformed for
        an argument that was there before."""
        if key in self._seen:
            raise Malformed
        draft, types = self._draft, _types_of(self._declared.get(key)) if types is None else types
        draft.put(("," if self._seen else "{") + json.dumps(key, ensure_ascii=False) + ":")
        self._seen.add(key)
        if types == {"string"}:
            draft.put('"')
            end = yield from text_until(draft.put_string, *ends, first=first)
            draft.put('"')
            return end
        chars: list[str] = []
        end = yield from text_until(chars.append, *ends, first=first)
        draft.put(_json_of("".join(chars), types))
        return end

    def close(self) -> None:
        """The call is complete."""
        if self._seen:
            self._draft.put("}")
        self._draft.close()


def key_until(end: str) -> Step[str]:
    """The name of an argument."""
    key, _ = yield from head_until(end)
    return key.strip()


def _types_of(schema: object) -> set[str]:
    """The types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {name for name in types if isinstance(name, str)}
    choices = schema.get("enum") or schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(choices, list):
        return set()
    if "enum" in schema:
        return {_names_of(choice)[0] for choice in choices}
    found = [_types_of(choice) for choice in choices]
    return set().union(*found) if all(found) else set()


def _names_of(value: object) -> tuple[str, ...]:
    return next(names for kind, names in _TYPES if isinstance(value, kind))


def _json_of(text: str, types: set[str]) -> str:
    """The value as JSON."""
    try:
        found = whole(text)
    except Malformed:
        return json.dumps(text, ensure_ascii=False)
    fits = not types or types.intersection(_names_of(json.loads(found)))
    return found if fits else json.dumps(text, ensure_ascii=False)
