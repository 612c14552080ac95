"""The JSON that a forced call must be, as a schema; `plain_json` reads what is written by it.

Used by `server/api/conversation.py`, API process. Pure.
"""

from collections.abc import Mapping
from typing import Any

from server.tools.use import ToolUse

Schema = dict[str, Any]

_OPEN = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "additionalProperties", "patternProperties")
"""With one of these, `properties` need not be all that an object may have."""


def forced_schema(use: ToolUse) -> Schema:
    """An array of calls; of a function that was named, its arguments alone."""
    if use.mode == "named":
        return _closed(next(iter(use.functions.values())))
    calls = {
        "type": "array",
        "items": {"anyOf": [_call(name, index) for index, name in enumerate(use.functions)]},
        "minItems": 1,
        "$defs": {
            f"tool{index}": _moved(_closed(schema), f"#/$defs/tool{index}")
            for index, schema in enumerate(use.functions.values())
        },
    }
    return calls | ({"maxItems": 1} if use.only_one else {})


def _call(name: str, index: int) -> Schema:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/tool{index}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _closed(schema: Mapping[str, object]) -> Schema:
    """An object of the declared properties and no others, unless the schema itself says what else it may have."""
    closed = {"type": "object", "properties": {}} | dict(schema)
    return closed if any(word in schema for word in _OPEN) else closed | {"additionalProperties": False}


def _moved(value: Any, place: str) -> Any:
    """A schema that stands at `place` in another one: its references are relative to it."""
    if isinstance(value, list):
        return [_moved(item, place) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(item, place) for key, item in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved
