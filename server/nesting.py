"""How deep JSON is nested. Used where bodies are read and where schemas are checked; any process. Pure."""

from collections.abc import Collection


def children(value: object) -> Collection[object]:
    """The items of a list, the values of an object; of anything else none."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def is_deeper(value: object, limit: int) -> bool:
    """Whether lists and objects stand within each other more than `limit` (at least 1) levels deep."""
    level = [value]
    while level and limit:
        level = [child for parent in level for child in children(parent) if isinstance(child, dict | list)]
        limit -= 1
    return bool(level)
