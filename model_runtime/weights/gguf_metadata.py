"""Typed access to the metadata of a GGUF file. Used by `gguf_config.py` and `gguf_rope.py`, engine and worker
processes; torch-free. Every method raises CheckpointError that names the key.
"""

import math
import struct

from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_file import GgufFile

_F32 = 0


class GgufMetadata:
    """The keys under the architecture's name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.prefix = file, architecture

    def has(self, key: str) -> bool:
        """Whether the file says anything."""
        return f"{self.prefix}.{key}" in self.file.metadata

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; float32 values are read as the shortest decimal that they stand for."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, "must be a positive number", value)
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.number(key, default)
        if not isinstance(value, int):
            raise self.error(key, "must be an integer", value)
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """An integer from 0."""
        value = self._value(key, default)
        return 0 if type(value) is int and value == 0 else self.integer(key, default)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._value(key, None)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false", value)
        return value

    def floats(self, tensor: str, count: int) -> list[float]:
        """The numbers of a small tensor, all of them positive."""
        stored = self.file.tensors[tensor]
        if stored.shape != (count,) or stored.type_id != _F32:
            raise CheckpointError(f"{self.file.path.name}: {tensor} must hold {count} numbers of type F32")
        with self.file.path.open("rb") as data:
            data.seek(stored.offset)
            found = list(struct.unpack(f"<{count}f", data.read(stored.num_bytes)))
        if not all(0 < number < math.inf for number in found):
            raise CheckpointError(f"{self.file.path.name}: {tensor} must hold positive numbers")
        return found

    def error(self, key: str, rule: str, value: object) -> CheckpointError:
        """That the value of a key breaks a rule."""
        return CheckpointError(f"{self.file.path.name}: {self.prefix}.{key} {rule}, not {value!r}")

    def refusal(self, what: str) -> CheckpointError:
        """That something is not supported."""
        return CheckpointError(f"{self.file.path.name}: {what} is not supported")

    def _value(self, key: str, default: float | None) -> object:
        name = f"{self.prefix}.{key}"
        value = self.file.metadata.get(name, default)
        if value is None:
            raise CheckpointError(f"{self.file.path.name}: {name} is missing")
        return value
