"""Reads the header of a safetensors file: which tensors it has, of which type and shape, and where
(https://github.com/huggingface/safetensors, Format). Reads no tensor and does not import torch.

Used by `safetensors_source.py`, engine and worker processes.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from model_runtime.weights.errors import AGAIN, CheckpointError
from model_runtime.weights.json_file import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64", "U64"), 8),
        **dict.fromkeys(("F32", "I32", "U32"), 4),
        **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
        **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    }
)
"""Types by the format's names."""


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """Where a tensor is."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file."""

    @property
    def num_bytes(self) -> int:
        """That it takes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def damaged(path: Path, problem: str) -> CheckpointError:
    """The error of a file that cannot be read as it should."""
    return CheckpointError(f"{path}: truncated or damaged: {problem}; {AGAIN}")


def read_header(path: Path) -> dict[str, SafetensorsEntry]:
    """Every tensor of a file. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise damaged(path, f"a header of {length} bytes in a file of {size}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise damaged(path, "its header is no JSON object")
    found.pop("__metadata__", None)
    entries = {key: _entry(path, key, value, 8 + length) for key, value in found.items()}
    _check_places(path, entries, 8 + length, size)
    return entries


def _entry(path: Path, key: str, value: object, start: int) -> SafetensorsEntry:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
            type(count) is int and count >= 0 for count in shape
        ):
            if dtype not in ITEM_BYTES:
                known = ", ".join(ITEM_BYTES)
                raise CheckpointError(f"{path}: {key} is stored as {dtype}, which is not supported; known are {known}")
            entry = SafetensorsEntry(dtype, tuple(shape), start + begin)
            if begin >= 0 and end - begin == entry.num_bytes:
                return entry
    raise damaged(path, f"the entry of {key} in its header is wrong")


def _check_places(path: Path, entries: dict[str, SafetensorsEntry], start: int, size: int) -> None:
    """Raises CheckpointError unless tensors fill the file from `start` to its end, one after the other. So a key that
    the header has twice leaves a hole."""
    end = start
    for key, entry in sorted(entries.items(), key=lambda each: (each[1].offset, each[1].num_bytes)):
        if entry.offset != end:
            raise damaged(path, f"{key} begins at byte {entry.offset}, and what comes before it ends at {end}")
        end += entry.num_bytes
    if end != size:
        raise damaged(path, f"its tensors end at byte {end} and the file at {size}")


def shard_files(folder: Path) -> tuple[list[str], Mapping[str, str] | None]:
    """The names of a checkpoint's files in order, and which of them has each key as the index says; None where there
    is a single file without one. Raises CheckpointError."""
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return [SINGLE], None
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; other weight formats are not supported")
    found = read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{folder / INDEX}: weight_map is missing or empty")
    for name in found.values():
        if not isinstance(name, str) or Path(name).name != name or not name.isprintable():
            raise CheckpointError(f"{folder / INDEX}: {name!r} is not the name of a file beside it")
    return sorted(set(found.values())), found
