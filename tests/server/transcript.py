"""What an output with tool calls holds, and the tools and arguments of the outputs in `transcripts.py`."""

from dataclasses import dataclass, field
from typing import Any

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
    },
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
    "mixed": {
        "type": "object",
        "properties": {
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "ratio": {"type": "number"},
            "flag": {"type": ["boolean", "null"]},
            "unit": {"enum": ["C", "F"]},
            "list": {"type": "array"},
        },
    },
}


@dataclass(frozen=True)
class Transcript:
    """An output."""

    text: str
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """(name, arguments)"""
    complete: bool = True
    """Whether the calls count as calls."""


HARD: dict[str, Any] = {"path": "a/{b}.py", "text": 'if x["}"]:\n\tprint("\\\\{访问👩‍👩‍👧")\n</tool_call'}
HARD_JSON = r'{ "path" : "a/{b}.py", "text": "if x[\"}\"]:\n\tprint(\"\\\\{访问\ud83d\udc69‍👩‍👧\")\n</tool_call" }'
NESTED: dict[str, Any] = {"where": {"at": [1, -2.5e3, [], {}, {"x": [None, True, {"y": ""}]}]}, "days": 3}
NESTED_JSON = '{"where": {"at": [1, -2.5e3, [], {}, {"x": [null, true, {"y": ""}]}]}, "days": 3}'
PARIS: dict[str, Any] = {"city": "Paris"}
PARIS_JSON = '{"city": "Paris"}'


def weather(arguments: Any = PARIS) -> tuple[str, Any]:
    return "get_weather", arguments


def call_json(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'
