"""Typed access to the keys of a config.json: a value of the right kind, or a CheckpointError that names the key.

Called by `hf_config.py`, `hf_deepseek.py` and `hf_rope.py` in the engine process; does not import torch.
"""

import math
from collections.abc import Mapping
from typing import NoReturn

from model_runtime.weights.errors import CheckpointError

Json = Mapping[str, object]


def fail(key: str, value: object, wanted: str) -> NoReturn:
    """Raises CheckpointError: what the key holds, and what it should."""
    raise CheckpointError(f"config.json: {key} must be {wanted}, not {value!r}")


def value_of(config: Json, key: str) -> object:
    """Whatever the key holds."""
    if key not in config:
        raise CheckpointError(f"config.json: {key} is missing")
    return config[key]


def integer(config: Json, key: str) -> int:
    """A positive integer."""
    value = value_of(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        fail(key, value, "a positive integer")
    return value


def number(config: Json, key: str) -> float:
    """A positive number."""
    value = value_of(config, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        fail(key, value, "a positive number")
    return float(value)


def flag(config: Json, key: bool | str) -> bool:
    """A fixed flag, or the one that the named key holds."""
    if isinstance(key, bool):
        return key
    value = value_of(config, key)
    if not isinstance(value, bool):
        fail(key, value, "true or false")
    return value


def mapping(config: Json, key: str) -> Json:
    """An object; empty if the key holds null."""
    value = value_of(config, key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        fail(key, value, "an object")
    return value
