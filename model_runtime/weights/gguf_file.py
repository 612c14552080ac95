"""Reads the head of a GGUF file: metadata and the table of tensors, not the tensors themselves.

Called by the tokenizer in the API process (vocabulary and chat template are metadata) and by the weight loader in the
engine process; does not import torch. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2
and 3, little endian. Every count and length is checked against the size of the file before it is used.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from model_runtime.weights.errors import CheckpointError

GgufScalar = int | float | bool | str
GgufValue = GgufScalar | list[int] | list[float] | list[bool] | list[str]

MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata value type -> struct code."""


@dataclass(frozen=True, slots=True)
class GgmlType:
    """How one kind of tensor is stored: blocks of `elements` numbers in `num_bytes` bytes."""

    name: str
    elements: int
    num_bytes: int


GGML_TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
}
"""ggml type id -> storage, for types that hold weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]
    """In torch's order: the last dimension is contiguous (the file stores the reverse)."""
    type_id: int
    """Key of GGML_TYPES."""
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """Metadata and tensor table of one file."""

    path: Path
    metadata: dict[str, GgufValue]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """A bounds-checked read position in the mapped file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.offset, self.end = data, path, 0, len(data)

    def error(self, message: str) -> CheckpointError:
        """An error that names the file."""
        return CheckpointError(f"{self.path.name}: {message}")

    def need(self, num_bytes: int, what: str) -> None:
        """Raises unless that many bytes are left."""
        if num_bytes > self.end - self.offset:
            raise self.error(f"truncated or damaged: {what} at byte {self.offset} runs past the end of the file")

    def numbers(self, code: str, count: int, what: str) -> tuple[int, ...]:
        """`count` little-endian numbers of one struct code (floats and bools for the codes f, d and ?)."""
        size = struct.calcsize("<" + code)
        self.need(size * count, what)
        values = struct.unpack_from(f"<{count}{code}", self.data, self.offset)
        self.offset += size * count
        return values

    def number(self, code: str, what: str) -> int:
        """One number."""
        return self.numbers(code, 1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings, each a 64-bit length and UTF-8 bytes. The hot loop: vocabularies have 10^5 of them."""
        self.need(8 * count, what)
        unpack, data, end, offset = struct.Struct("<Q").unpack_from, self.data, self.end, self.offset
        found: list[str] = []
        try:
            for _ in range(count):
                start = offset + 8
                offset = start + unpack(data, offset)[0]
                if offset > end:
                    raise self.error(f"truncated or damaged: {what} runs past the end of the file")
                found.append(data[start:offset].decode())
        except UnicodeDecodeError:
            raise self.error(f"damaged: {what} is not UTF-8") from None
        except struct.error:
            raise self.error(f"truncated or damaged: {what} runs past the end of the file") from None
        self.offset = offset
        return found

    def string(self, what: str) -> str:
        """One string."""
        return self.strings(1, what)[0]


def _array(cursor: _Cursor, key: str) -> GgufValue:
    what = f"array {key!r}"
    element = cursor.number("I", what)
    count = cursor.number("Q", what)
    if element == _STRING:
        return cursor.strings(count, what)
    if element not in _SCALARS:
        raise cursor.error(f"{what} holds elements of type {element}, which is not supported")
    return list(cursor.numbers(_SCALARS[element], count, what))


def _metadata(cursor: _Cursor, count: int) -> dict[str, GgufValue]:
    found: dict[str, GgufValue] = {}
    for _ in range(count):
        key = cursor.string("a metadata key")
        if key in found:
            raise cursor.error(f"damaged: metadata key {key!r} appears twice")
        kind = cursor.number("I", f"value of {key!r}")
        if kind == _ARRAY:
            found[key] = _array(cursor, key)
        elif kind == _STRING:
            found[key] = cursor.string(f"value of {key!r}")
        elif kind in _SCALARS:
            found[key] = cursor.number(_SCALARS[kind], f"value of {key!r}")
        else:
            raise cursor.error(f"metadata key {key!r} has unknown type {kind}")
    return found


def _tensor(cursor: _Cursor) -> GgufTensor:
    """One entry of the table; its offset is still relative to the data section."""
    name = cursor.string("a tensor name")
    num_dimensions = cursor.number("I", f"tensor {name!r}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible")
    shape = cursor.numbers("Q", num_dimensions, f"tensor {name!r}")[::-1]
    type_id = cursor.number("I", f"tensor {name!r}")
    offset = cursor.number("Q", f"tensor {name!r}")
    stored = GGML_TYPES.get(type_id)
    if stored is None:
        raise cursor.error(f"tensor {name!r} has ggml type {type_id}, which is not supported")
    if 0 in shape or shape[-1] % stored.elements:
        raise cursor.error(f"tensor {name!r} of shape {list(shape)} does not divide into blocks of {stored.name}")
    num_bytes = math.prod(shape) // stored.elements * stored.num_bytes
    return GgufTensor(name=name, shape=shape, type_id=type_id, offset=offset, num_bytes=num_bytes)


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    relative = [_tensor(cursor) for _ in range(count)]
    base = -(-cursor.offset // alignment) * alignment
    found: dict[str, GgufTensor] = {}
    for tensor in relative:
        if tensor.name in found:
            raise cursor.error(f"damaged: tensor {tensor.name!r} appears twice")
        offset = base + tensor.offset
        if offset + tensor.num_bytes > cursor.end or tensor.offset % alignment:
            raise cursor.error(
                f"truncated or damaged: tensor {tensor.name!r} needs bytes {offset} to {offset + tensor.num_bytes}, "
                f"aligned to {alignment}, and the file has {cursor.end}"
            )
        found[tensor.name] = GgufTensor(
            name=tensor.name, shape=tensor.shape, type_id=tensor.type_id, offset=offset, num_bytes=tensor.num_bytes
        )
    return found


def _parse(cursor: _Cursor) -> GgufFile:
    magic, version = cursor.numbers("I", 2, "the header")
    if magic.to_bytes(4, "little") != b"GGUF":
        raise cursor.error("not a GGUF file")
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version} is not supported; little-endian versions 2 and 3 are")
    num_tensors, num_values = cursor.numbers("Q", 2, "the header")
    metadata = _metadata(cursor, num_values)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment must be a power of two, not {alignment!r}")
    return GgufFile(path=cursor.path, metadata=metadata, tensors=_tensors(cursor, num_tensors, alignment))


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and tensor table. Raises CheckpointError for a file that is missing, damaged or not supported."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path.name}: not a GGUF file: it is empty") from None
