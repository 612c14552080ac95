"""What a JSON schema may say, checked before the grammar library sees it: unknown keywords and types are errors with
their place, and there is an end to every output. Used by the checking process (`worker.py`). Pure.

The library's own checks follow (numbers, patterns, combinations that nothing fulfils); its messages quote what they
are about.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote

from server.grammar.errors import GrammarError
from server.nesting import children, is_deeper

Schema = dict[str, object] | bool

MAX_DEPTH = 100
"""Objects and arrays of a schema within each other: some 50 nested objects."""
MAX_OPTIONAL = 100
"""Properties of one object that are not required: each may follow each, which takes the library time and memory."""
MAX_EXACT = 2**53
"""Beyond it not every integer is a float."""
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
SCALAR_TYPES = TYPES - {"array", "object"}
SCHEMA_KEYS = ("items", "additionalItems", "additionalProperties")
LIST_KEYS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions")
VALUE_KEYS = (
    *("$ref", "type", "const", "enum", "format", "pattern", "minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "required"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "example", "examples"),
        *("deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "discriminator"),
    }
)
"""Change nothing about what is valid; so do names that begin with x-."""
KEYWORDS = frozenset({*SCHEMA_KEYS, *LIST_KEYS, *MAP_KEYS, *VALUE_KEYS})


def check_schema(document: object) -> None:
    """Raises GrammarError that names the place as a JSON pointer."""
    if is_deeper(document, MAX_DEPTH):
        raise GrammarError(f"the schema is nested more than {MAX_DEPTH} levels deep")
    if not isinstance(document, dict):
        raise GrammarError("at #: a schema must be an object")
    found = _Found(document)
    found.visit(document, "#")
    found.resolve()
    if not found.can_end(document):
        raise GrammarError("at #: every output would be endless, or there is none")


def _at(place: str, name: object) -> str:
    return f"{place}/{str(name).replace('~', '~0').replace('/', '~1')[:64]}"


@dataclass(slots=True)
class _Found:
    """What is in a schema: its references, and which of them lead to something finite."""

    root: object
    references: dict[str, str] = field(default_factory=dict)
    """Reference -> where it first stands."""
    targets: dict[str, object] = field(default_factory=dict)
    ending: set[str] = field(default_factory=set)
    """References to schemas of which a finite output is known."""

    def visit(self, schema: object, place: str) -> None:
        """Check a schema and those within."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise GrammarError(f"at {place}: a schema must be an object")
        for key, value in schema.items():
            if key not in KEYWORDS and key not in ANNOTATIONS and not key.startswith("x-"):
                raise GrammarError(f"at {place}: the keyword {key[:64]!r} is not supported")
            if key == "x-guidance":
                raise GrammarError(f"at {place}: the keyword 'x-guidance' is not supported")
            for name, child in _subschemas(key, value, place):
                self.visit(child, name)
        _check_types(schema, place)
        for key in VALUE_KEYS:
            if (number := _inexact_number(schema.get(key))) is not None:
                raise GrammarError(
                    f"at {_at(place, key)}: {number} is not supported, as no 64-bit float is equal to it"
                )
        _check_optional(schema, place)
        if "$ref" in schema:
            self._note_reference(schema["$ref"], place)

    def _note_reference(self, reference: object, place: str) -> None:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise GrammarError(f"at {place}: $ref must point into the schema itself, as in '#/$defs/name'")
        self.references.setdefault(reference, place)

    def resolve(self) -> None:
        """Find what references point to, and which of it can end: until no more is found."""
        for reference, place in self.references.items():
            self.targets[reference] = _target(self.root, reference, place)
        while more := {
            reference
            for reference, target in self.targets.items()
            if reference not in self.ending and self.can_end(target)
        }:
            self.ending |= more

    def can_end(self, schema: object) -> bool:
        """Whether a finite output fulfils the schema, as far as `ending` is known; values and lengths aside."""
        if not isinstance(schema, dict):
            return schema is True
        if "$ref" in schema and schema["$ref"] not in self.ending:
            return False
        if not all(map(self.can_end, _list(schema.get("allOf")))):
            return False
        for key in ("anyOf", "oneOf"):
            if key in schema and not any(map(self.can_end, _list(schema[key]))):
                return False
        if "const" in schema or "enum" in schema:
            return True
        types = schema.get("type", [*TYPES])
        types = types if isinstance(types, list) else [types]
        return (
            not SCALAR_TYPES.isdisjoint(types)
            or ("object" in types and self._object_can_end(schema))
            or ("array" in types and self._array_can_end(schema))
        )

    def _object_can_end(self, schema: dict[str, object]) -> bool:
        known = _properties(schema)
        other = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(self.can_end(known.get(str(name), other)) for name in _list(schema.get("required")))

    def _array_can_end(self, schema: dict[str, object]) -> bool:
        least, first = schema.get("minItems", 0), _list(schema.get("prefixItems"))
        if not isinstance(least, int | float):
            return True
        needed = [*first[: int(least)], *([schema.get("items", True)] if least > len(first) else [])]
        return all(map(self.can_end, needed))


def _inexact_number(value: object) -> int | None:
    """An integer that the library would take for another: it reads them as floats, and cuts them at 64 bits."""
    if isinstance(value, dict | list):
        return next((found for child in children(value) if (found := _inexact_number(child)) is not None), None)
    if not isinstance(value, int) or abs(value) <= MAX_EXACT:
        return None
    return None if abs(value) < 2**64 and max(-(2**63), min(int(float(value)), 2**63 - 1)) == value else value


def _properties(schema: dict[str, object]) -> dict[str, object]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _subschemas(key: str, value: object, place: str) -> Iterator[tuple[str, object]]:
    """(place, schema) of the schemas that a keyword has."""
    inner = _at(place, key)
    if key in MAP_KEYS:
        if not isinstance(value, dict):
            raise GrammarError(f"at {inner}: must be an object")
        yield from ((_at(inner, name), child) for name, child in value.items())
    elif key in LIST_KEYS or (key == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise GrammarError(f"at {inner}: must be a list")
        yield from ((_at(inner, index), child) for index, child in enumerate(value))
    elif key in SCHEMA_KEYS:
        yield inner, value


def _check_types(schema: dict[str, object], place: str) -> None:
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in TYPES:
            raise GrammarError(
                f"at {place}: there is no type {str(name)[:64]!r}; the types are {', '.join(sorted(TYPES))}"
            )
    if "format" in schema and schema["format"] not in FORMATS:
        raise GrammarError(
            f"at {place}: the format {str(schema['format'])[:64]!r} is not supported; use one of "
            f"{', '.join(FORMATS)}, or a pattern"
        )


def _check_optional(schema: dict[str, object], place: str) -> None:
    required = {name for name in _list(schema.get("required")) if isinstance(name, str)}
    optional = len(_properties(schema).keys() - required)
    if optional > MAX_OPTIONAL:
        raise GrammarError(
            f"at {place}: {optional} properties are not required, and at most {MAX_OPTIONAL} are supported; require "
            "some of them, or divide the object"
        )


def _target(root: object, reference: str, place: str) -> object:
    """What a reference points to (RFC 6901)."""
    node = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            raise GrammarError(f"at {place}: {reference[:100]!r} points to nothing")
    return node
