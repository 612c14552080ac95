"""How deep the JSON that clients send as it is may be nested. Used by the schemas beside it; API process. Pure."""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator

MAX_DEPTH = 100

T = TypeVar("T")


def bounded_depth(value: T) -> T:
    """The JSON value itself. Raises ValueError where lists and objects are nested deeper than MAX_DEPTH."""
    level = _containers([value])
    for _ in range(MAX_DEPTH):
        level = _containers([item for parent in level for item in _items(parent)])
    if level:
        raise ValueError(f"must not be nested more than {MAX_DEPTH} levels deep")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(bounded_depth)]
"""A field that holds one."""


def _containers(values: list[object]) -> list[object]:
    return [value for value in values if isinstance(value, dict | list)]


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
