"""The grammar of an output that must call functions, or may where its answer must have a form.

Made for each such request by `server/output_forms.py`; API process. Pure.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from server.grammar.grammar import Grammar
from server.tools.use import ToolUse

Wrap: TypeAlias = Callable[[str], tuple[str, str]]
"""From a function's name to what stands before and after the arguments of a call, which are JSON."""

_OPEN = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "additionalProperties", "patternProperties")
"""With one of these, `properties` need not be all that an object may have."""


def calls_grammar(use: ToolUse, wrap: Wrap, answer: Grammar | None) -> Grammar:
    """Calls in a format; where they are not forced, or else `answer`."""
    calls = []
    for name, schema in use.functions.items():
        begin, end = wrap(name)
        calls.append({"name": name, "begin": begin, "schema": _closed(schema), "end": end})
    text = json.dumps({"calls": calls, "only_one": use.only_one})
    return Grammar(kind="calls", text=text, answer=answer if use.mode == "auto" else None, param="tools")


def _closed(schema: Mapping[str, object]) -> dict[str, Any]:
    """An object of the declared properties and no others, unless the schema itself says what else it may have."""
    closed = {"type": "object", "properties": {}} | dict(schema)
    return closed if any(word in schema for word in _OPEN) else closed | {"additionalProperties": False}
