"""Typed access to the keys of a config.json: a value of the right kind, or a CheckpointError that names the key.

Called by the `hf_*.py` beside it, engine and worker processes; does not import torch.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

from model_runtime.weights.errors import CheckpointError

Json = Mapping[str, object]

MOST_LAYERS, MOST_PARTS, MOST_EXPERTS, MOST_CHANNELS, MOST_TOKENS = 4096, 2**16, 2**20, 2**22, 2**24
"""Far more than any model has; experts in all layers together. What is counted is gone through one by one, long before
memory is asked for."""
LIMITS: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers", "depth"), MOST_LAYERS)
    | dict.fromkeys(("num_attention_heads", "num_key_value_heads", "swa_num_key_value_heads"), MOST_PARTS)
    | dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), MOST_PARTS)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), MOST_PARTS)
    | dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), MOST_PARTS)
    | dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"), MOST_CHANNELS)
    | dict.fromkeys(("shared_expert_intermediate_size", "intermediate_size_mlp"), MOST_CHANNELS)
    | {"vocab_size": MOST_TOKENS}
)
MOST, LARGEST = 2**40, 1e30
"""The same of any other integer, and of any number: floats hold it, and products of two."""


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
    if value > (most := LIMITS.get(key, MOST)):
        fail(key, value, f"at most {most}")
    return value


def number(config: Json, key: str) -> float:
    """A positive number."""
    value = value_of(config, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        fail(key, value, "a positive number")
    if value > LARGEST:
        fail(key, value, f"at most {LARGEST:.0e}")
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


def layer_list(config: Json, key: str) -> list[int]:
    """A list of layers; null is none."""
    listed = value_of(config, key) or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        fail(key, listed, "a list of layers")
    return listed


def check_known(where: str, found: Json, known: Mapping[str, object]) -> None:
    """Raises CheckpointError for a key that is not known, or has none of the values that are listed for it."""
    for key, value in found.items():
        if key not in known:
            raise CheckpointError(f"config.json: {where}.{key} ({value!r}) is not known, and may change the numbers")
        allowed = known[key]
        if isinstance(allowed, tuple) and value not in allowed:
            fail(f"{where}.{key}", value, " or ".join(map(repr, allowed)))


def strings(where: str, found: Json, *keys: str) -> tuple[str, ...]:
    """The names in lists under some keys; those that begin with `re:` are patterns."""
    values: list[str] = []
    for key in keys:
        value = found.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            fail(f"{where}.{key}", value, "a list of names")
        values += value
    for name in values:
        if name.startswith("re:"):
            try:
                re.compile(name.removeprefix("re:"))
            except re.error:
                fail(where, name, "a pattern")
    return tuple(values)


def block_size(where: str, value: object) -> tuple[int, int]:
    """Two positive numbers."""
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    fail(where, value, "two positive numbers")
