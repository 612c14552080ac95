"""Tensors of a folder with safetensors files, one or many. Used by `opening.py`, engine and worker processes.

Numbers are read, not mapped: what the system cannot read is an error that names the file, where a page of a mapping
that cannot be read ends the process.
"""

import itertools
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from model_runtime.weights.errors import AGAIN, CheckpointError
from model_runtime.weights.safetensors_file import (
    INDEX,
    SafetensorsEntry,
    damaged,
    read_header,
    shard_files,
)
from model_runtime.weights.source import Index, Numbers, StoredTensor

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.uint8,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
"""What tensors of each type are read as. An E8M0 is an exponent, of which the byte is wanted."""


def _runs(shape: tuple[int, ...], index: Index) -> tuple[Iterator[int], int]:
    """(where neighbouring numbers of a part begin in the tensor, how many they are), in order."""
    split = len(shape)
    while split > 1 and index[split - 1] == slice(0, shape[split - 1]):
        split -= 1
    inner = math.prod(shape[split:])
    strides = [math.prod(shape[place + 1 :]) for place in range(split)]
    outer = [range(part.start, part.stop) for part in index[: split - 1]]
    last = index[split - 1] if shape else slice(0, 1)
    starts = (
        sum(place * stride for place, stride in zip((*places, last.start), strides, strict=False))
        for places in itertools.product(*outer)
    )
    return starts, (last.stop - last.start) * inner


class Shard:
    """A file that stays open as long as this is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, memory: memoryview, place: int) -> None:
        """Fill memory with the bytes from a place on. Raises CheckpointError."""
        while memory:
            try:
                count = os.preadv(self._descriptor, [memory], place)
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path}: {error.strerror}; {AGAIN}") from None
            if not count:
                raise damaged(self.path, f"it ends at byte {place}, while it is read")
            memory, place = memory[count:], place + count


class FileTensor(Numbers):
    """A tensor in an open file: a StoredTensor."""

    def __init__(self, shard: Shard, entry: SafetensorsEntry) -> None:
        self._shard, self._entry = shard, entry

    @property
    def shape(self) -> tuple[int, ...]:
        """As in StoredTensor."""
        return self._entry.shape

    @property
    def dtype(self) -> torch.dtype:
        """As in StoredTensor."""
        return DTYPES[self._entry.dtype]

    @property
    def file(self) -> str:
        """As in StoredTensor."""
        return self._shard.path.name

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        if target.dtype != self.dtype:
            stored = torch.empty(target.shape, dtype=self.dtype)
            self.read_into(index, stored)
            target.copy_(stored)
            return
        assert target.is_contiguous(), "numbers are read to neighbouring places"
        if not target.numel():
            return
        memory = target.view(-1).view(torch.uint8).numpy().data
        starts, count = _runs(self.shape, index)
        size = count * self.dtype.itemsize
        for number, start in enumerate(starts):
            place = self._entry.offset + start * self.dtype.itemsize
            self._shard.read(memory[number * size : (number + 1) * size], place)


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Those of one file, which stays open as long as they are there. Raises CheckpointError."""
    entries = read_header(path)
    shard = Shard(path)
    return {key: FileTensor(shard, entry) for key, entry in entries.items()}


def read_safetensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint; its files stay open as long as these are there. Compares what is in the files with
    the index. Raises CheckpointError."""
    names, weight_map = shard_files(folder)
    found: dict[str, StoredTensor] = {}
    for name in names:
        for key, tensor in read_tensors(folder / name).items():
            if weight_map is not None and weight_map.get(key) != name:
                raise CheckpointError(f"{folder / name} holds {key}, which {INDEX} does not place there")
            found[key] = tensor
    if lost := sorted((weight_map or {}).keys() - found.keys()):
        assert weight_map is not None, "without an index nothing is lost"
        where = ", ".join(f"{key} ({weight_map[key]})" for key in lost[:8])
        raise CheckpointError(f"{folder / INDEX} lists tensors that their files do not hold: {where}; {AGAIN}")
    return found
