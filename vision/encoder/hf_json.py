"""Checked access to a parsed config.json: every complaint names the key and what it should have held.

Used by the readers beside it, in the engine process; imports no torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

from vision.tower_config import Activation, VisionConfigError

Json = Mapping[str, object]

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}

LAYER_COUNTS, MOST_LAYERS = ("depth", "num_hidden_layers"), 4096
"""Keys of what is gone through one by one, and far more than any tower has."""
MOST, LARGEST = 2**40, 1e30
"""The same of other integers, and of numbers: floats hold it, and products of two."""


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Section:
    """One object of a config.json over the defaults of its family. Every method raises VisionConfigError."""

    def __init__(self, values: Json, defaults: Json, path: str = "") -> None:
        self._values: Json = {**defaults, **values}
        self._path = path

    def _fail(self, key: str, wanted: str) -> NoReturn:
        raise VisionConfigError(f"config.json: {self._path}{key} must be {wanted}, not {self._value(key)!r}")

    def _value(self, key: str) -> object:
        if key not in self._values:
            raise VisionConfigError(f"config.json: {self._path}{key} is missing")
        return self._values[key]

    def section(self, key: str, defaults: Json, spellings: Mapping[str, str] = MappingProxyType({})) -> "Section":
        """The object under a key; `spellings` says what other names for its keys stand for."""
        value = self._value(key)
        if not isinstance(value, Mapping):
            self._fail(key, "an object")
        values = {spellings.get(name, name): item for name, item in value.items()}
        return Section(values, defaults, f"{self._path}{key}.")

    def has(self, key: str) -> bool:
        """Whether the key is set, and not to null."""
        return self._values.get(key) is not None

    def integer(self, key: str) -> int:
        """A positive integer."""
        value = self._value(key)
        if not isinstance(value, int) or not _is_integer(value) or value <= 0:
            self._fail(key, "a positive integer")
        if value > (most := MOST_LAYERS if key in LAYER_COUNTS else MOST):
            self._fail(key, f"at most {most}")
        return value

    def number(self, key: str) -> float:
        """A positive number."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self._fail(key, "a positive number")
        if value > LARGEST:
            self._fail(key, f"at most {LARGEST:.0e}")
        return float(value)

    def flag(self, key: str) -> bool:
        """true or false."""
        value = self._value(key)
        if not isinstance(value, bool):
            self._fail(key, "true or false")
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self._value(key)
        if not isinstance(value, str):
            self._fail(key, "a string")
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of these strings."""
        value = self._value(key)
        if not isinstance(value, str) or value not in choices:
            self._fail(key, " or ".join(choices))
        return value

    def activation(self, key: str) -> Activation:
        """The activation that transformers calls so."""
        return ACTIVATIONS[self.choice(key, tuple(ACTIVATIONS))]

    def must_be(self, key: str, wanted: object) -> None:
        """Refuses every value but the one that is supported."""
        if self._value(key) != wanted:
            self._fail(key, repr(wanted))

    def square(self, key: str) -> int:
        """A positive integer, or a list of two equal ones."""
        value = self._value(key)
        if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
            value = value[0]
        if not isinstance(value, int) or not _is_integer(value) or value <= 0:
            self._fail(key, "a positive integer, or two equal ones")
        return value

    def heads(self, width_key: str, heads_key: str) -> int:
        """A number of heads that divides a width."""
        heads = self.integer(heads_key)
        if self.integer(width_key) % heads:
            self._fail(heads_key, f"a divisor of {width_key}")
        return heads

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers."""
        value = self._value(key)
        if not isinstance(value, list | tuple) or not all(_is_integer(item) for item in value):
            self._fail(key, "a list of integers")
        return tuple(value)

    def layers(self, key: str) -> tuple[int, ...]:
        """An integer, or a list of at least one."""
        value = self._value(key)
        if isinstance(value, int) and _is_integer(value):
            return (value,)
        if not value:
            self._fail(key, "an integer or a list of integers")
        return self.integers(key)
