"""What a JSON schema may say: faults are named with their place, and so is a schema that no finite output fits."""

import json

import pytest

from server.grammar.errors import GrammarError
from server.grammar.schema import MAX_DEPTH, MAX_OPTIONAL, check_schema

LINK = {"$ref": "#/$defs/node"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "hiccup"}, "at #: there is no type 'hiccup'; the types are array, boolean"),
        ({"type": 123}, "at #: there is no type '123'"),
        ({"type": ["string", "hiccup"]}, "at #: there is no type 'hiccup'"),
        ({"properties": {"a/b": {"items": {"not": {}}}}}, "at #/properties/a~1b/items: the keyword 'not' is not"),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "at #/anyOf/1: the keyword 'uniqueItems' is not supported"),
        ({"$defs": {"a": {"requried": []}}}, "at #/$defs/a: the keyword 'requried' is not supported"),
        ({"x-guidance": {"lenient": True}}, "at #: the keyword 'x-guidance' is not supported"),
        ({"properties": []}, "at #/properties: must be an object"),
        ({"properties": {"a": 5}}, "at #/properties/a: a schema must be an object"),
        ({"oneOf": {}}, "at #/oneOf: must be a list"),
        ({"items": [{"format": "zip"}]}, "at #/items/0: the format 'zip' is not supported; use one of date, date-time"),
        ({"properties": {"a": {"format": []}}}, "at #/properties/a: the format '[]' is not supported"),
        ({"$ref": "http://example.com/a"}, "at #: $ref must point into the schema itself"),
        ({"$ref": 5}, "at #: $ref must point into the schema itself"),
        ({"items": {"$ref": "#/$defs/no"}}, "at #/items: '#/$defs/no' points to nothing"),
        (
            {"items": {"const": [{"a": 2**64}]}},
            f"at #/items/const: {2**64} is not supported, as no 64-bit float is equal",
        ),
        ({"enum": [1, -(2**63) - 1]}, f"at #/enum: -{2**63 + 1} is not supported"),
        ({"enum": [2**53 + 1]}, f"at #/enum: {2**53 + 1} is not supported"),
        ({"maximum": 2**63}, f"at #/maximum: {2**63} is not supported"),
        (True, "at #: a schema must be an object"),
        ([], "at #: a schema must be an object"),
    ],
)
def test_faults_are_named_with_their_place(schema: object, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        check_schema(schema)
    assert str(caught.value).startswith(message)


def test_depth_is_limited() -> None:
    def nested(levels: int) -> object:
        return json.loads('{"items":' * (levels - 1) + "{}" + "}" * (levels - 1))

    check_schema(nested(MAX_DEPTH))
    with pytest.raises(GrammarError, match="more than 100 levels"):
        check_schema(nested(MAX_DEPTH + 1))


def test_the_number_of_optional_properties_is_limited() -> None:
    names = [f"n{number}" for number in range(MAX_OPTIONAL + 1)]
    schema = {"properties": {name: {} for name in names}, "required": names[:1]}
    check_schema({"items": schema})
    with pytest.raises(
        GrammarError, match="at #/items: 101 properties are not required, and at most 100 are supported"
    ):
        check_schema({"items": schema | {"required": ["other"]}})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]},
        {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
        {"allOf": [{"type": "string"}, {"$ref": "#"}]},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
    ],
)
def test_what_never_ends_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(GrammarError, match="every output would be endless"):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}], "$defs": {"node": {"$ref": "#"}}},
        {"$defs": {"node": {"type": "object", "properties": {"a": {"anyOf": [LINK, {"const": 1}]}}, "required": ["a"]}}}
        | LINK,
        {"$ref": "#/$defs/a%20b~1c", "$defs": {"a b/c": {"enum": [1]}}},
        {"title": "A", "description": "b", "default": {"not": 1}, "examples": [1], "deprecated": True, "x-order": 3},
        {"const": {"type": "hiccup", "a": [-(2**63), 2**63 - 1, 2**60, True, 1e300]}},
        {"properties": {"not": {"type": "string"}, "$ref": {"type": "integer"}}},
    ],
)
def test_what_is_fine_passes(schema: dict[str, object]) -> None:
    check_schema(schema)
