"""The grammar of an output that must call functions, that may where its answer must have a form, or that must follow
their schemas if it does.

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
    text = json.dumps({"calls": _calls(use, wrap), "only_one": use.only_one})
    return Grammar(kind="calls", text=text, answer=answer if use.mode == "auto" else None, param="tools")


def strict_grammar(use: ToolUse, wrap: Wrap, trigger: str) -> Grammar:
    """Any text, in which whatever begins with `trigger` is a call."""
    structures = _calls(use, wrap)
    return Grammar(
        kind="structural_tag", text=json.dumps({"structures": structures, "triggers": [trigger]}), param="tools"
    )


def _calls(use: ToolUse, wrap: Wrap) -> list[dict[str, Any]]:
    calls = []
    for name, schema in use.functions.items():
        begin, end = wrap(name)
        calls.append({"name": name, "begin": begin, "schema": _closed(schema), "end": end})
    return calls


def _closed(schema: Mapping[str, object]) -> dict[str, Any]:
    """An object of the declared properties and no others, unless the schema itself says what else it may have."""
    closed = {"type": "object", "properties": {}} | dict(schema)
    return closed if any(word in schema for word in _OPEN) else closed | {"additionalProperties": False}
