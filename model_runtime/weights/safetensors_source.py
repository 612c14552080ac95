"""Tensors of a folder with safetensors files, one or many. Used by `checkpoint.py`, engine and worker processes."""

from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_runtime.quantized import QuantizedFormat, QuantizedMatrix
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.json_file import read_json
from model_runtime.weights.source import Index

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Index) -> Tensor: ...


class _File(Protocol):
    """What `safe_open` returns; the library does not annotate it."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _Slice: ...


def _open(path: Path) -> _File:
    try:
        file: _File = safe_open(str(path), framework="pt", device="cpu")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or 'no such file'}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path.name}: truncated or damaged: {error}") from None
    return file


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor key -> file name as the index says; None when there is a single file without an index."""
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return None
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; other weight formats are not supported")
    found = read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{INDEX}: weight_map is missing or empty")
    for name in found.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{INDEX}: {name!r} is not the name of a file beside it")
    return found


class SafetensorsSource:
    """The files stay mapped for as long as this object lives; a tensor is copied out of the mapping when it is read."""

    def __init__(self, folder: Path) -> None:
        """Open every file and compare the tensors in it with the index. Raises CheckpointError."""
        weight_map = _weight_map(folder)
        names = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        self._file_of: dict[str, _File] = {}
        for name in names:
            self._add_file(folder / name, weight_map)
        lost = sorted((weight_map or {}).keys() - self._file_of.keys())
        if lost:
            raise CheckpointError(f"{INDEX} lists tensors that their files do not hold: {', '.join(lost[:8])}")

    def _add_file(self, path: Path, weight_map: dict[str, str] | None) -> None:
        file = _open(path)
        for key in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
            if weight_map is not None and weight_map.get(key) != path.name:
                raise CheckpointError(f"{path.name} holds {key}, which {INDEX} does not place there")
            self._file_of[key] = file

    def keys(self) -> frozenset[str]:
        """As in TensorSource."""
        return frozenset(self._file_of)

    def shape(self, key: str) -> tuple[int, ...]:
        """As in TensorSource."""
        return tuple(self._file_of[key].get_slice(key).get_shape())

    def dtype(self, key: str) -> torch.dtype:
        """As in TensorSource."""
        name = self._file_of[key].get_slice(key).get_dtype()
        if name not in _DTYPES:
            raise CheckpointError(f"{key} is stored as {name}; {', '.join(_DTYPES)} are supported")
        return _DTYPES[name]

    def quantized(self, key: str) -> QuantizedFormat | None:
        """As in TensorSource: these files hold numbers only."""
        return None

    def read_quantized(self, key: str, index: Index) -> QuantizedMatrix:
        """As in TensorSource; never called, since `quantized` names nothing."""
        raise AssertionError(f"{key} holds no blocks of integers")

    def read_into(self, key: str, index: Index, target: Tensor) -> None:
        """As in TensorSource."""
        target.copy_(self._file_of[key].get_slice(key)[index])
