"""Experts that a checkpoint has stacked in one tensor a layer, as GPT-OSS's has: a source of every expert's matrices by
itself. Used by `spelling.py`, engine and worker processes.

Rows of gate and up alternate. Matrices are [E, K, N], the other way round than everywhere else, with biases [E, N]; or
in MXFP4 (Open Compute Project, microscaling formats 1.0), whose blocks of 32 numbers are 16 bytes of two, the first in
the low half, with a power of two as scale: [E, N, K / 32, 16] and [E, N, K / 32].

Legend: E experts, N rows and K columns of one expert's matrix.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.quantized import BLOCK, QuantizedFormat, QuantizedMatrix
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.source import Index, TensorSource

_KEY = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)")
_PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign."""
_BIAS = 127
"""What a scale stands for is 2 to the power of its byte less this."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Every `step`-th row of an expert's matrix or bias, from `first` on."""

    key: str
    """Of the stack, without the ending of MXFP4's two tensors."""
    kind: str
    """What follows the name of the projection: nothing, _bias, or _blocks."""
    expert: int
    first: int
    step: int

    def rows(self, index: slice) -> slice:
        """Where some of the rows are among all of the stack."""
        return slice(index.start * self.step, index.stop * self.step)


class Stacks:
    """The tensors of a source, experts one by one: a TensorSource."""

    def __init__(self, source: TensorSource) -> None:
        """Raises CheckpointError for tensors that are not stacks."""
        self._source = source
        self._places: dict[str, _Place] = {}
        self._others = frozenset(key for key in source.keys() if not _KEY.fullmatch(key))  # noqa: SIM118
        for key in sorted(source.keys() - self._others):
            found = _KEY.fullmatch(key)
            assert found is not None, "it did match"
            self._add(key, *found.groups())

    def _add(self, key: str, experts: str, projection: str, kind: str) -> None:
        dimensions = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}[kind]
        if len(shape := self._source.shape(key)) != dimensions:
            raise CheckpointError(f"{key} has shape {list(shape)}, which is no stack of experts")
        if kind == "_scales":  # read with its blocks
            return
        if kind == "_blocks" and key.replace("_blocks", "_scales") not in self._source.keys():  # noqa: SIM118
            raise CheckpointError(f"{key} has no scales beside it")
        parts, ending = _PARTS[projection], "bias" if kind == "_bias" else "weight"
        for expert in range(shape[0]):
            for first, part in enumerate(parts):
                place = _Place(key, kind, expert, first, len(parts))
                self._places[f"{experts}.{expert}.{part}.{ending}"] = place

    def keys(self) -> frozenset[str]:
        """As in TensorSource."""
        return self._others | self._places.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """As in TensorSource."""
        if key in self._others:
            return self._source.shape(key)
        place = self._places[key]
        shape = self._source.shape(place.key)
        if place.kind == "_blocks":
            return shape[1] // place.step, shape[2] * BLOCK
        return (shape[1] // place.step,) if place.kind == "_bias" else (shape[2] // place.step, shape[1])

    def dtype(self, key: str) -> torch.dtype:
        """As in TensorSource; MXFP4's numbers are bfloat16's."""
        if key in self._others:
            return self._source.dtype(key)
        place = self._places[key]
        return torch.bfloat16 if place.kind == "_blocks" else self._source.dtype(place.key)

    def quantized(self, key: str) -> QuantizedFormat | None:
        """As in TensorSource: none of it is kept as integers."""
        return None

    def read_quantized(self, key: str, index: Index) -> QuantizedMatrix:
        """As in TensorSource; never called, since `quantized` names nothing."""
        raise AssertionError(f"{key} holds no blocks of integers")

    def read_into(self, key: str, index: Index, target: Tensor) -> None:
        """As in TensorSource."""
        if key in self._others:
            return self._source.read_into(key, index, target)
        place = self._places[key]
        if place.kind == "_blocks":
            rows_NK = self._mxfp4(place, index)
        elif place.kind == "_bias":
            rows_NK = self._read(place.key, place, (place.rows(index[0]),), self._source.dtype(place.key))
        else:
            columns_KN = self._read(place.key, place, (index[1], place.rows(index[0])), self._source.dtype(place.key))
            rows_NK = columns_KN.T
        target.copy_(rows_NK[place.first :: place.step])

    def _read(self, key: str, place: _Place, index: Index, dtype: torch.dtype) -> Tensor:
        """A part of an expert's tensor."""
        read = torch.empty(1, *(part.stop - part.start for part in index), dtype=dtype)
        self._source.read_into(key, (slice(place.expert, place.expert + 1), *index), read)
        return read[0]

    def _mxfp4(self, place: _Place, index: Index) -> Tensor:
        """[N, K]: some rows, gate and up still in turn."""
        rows, columns = place.rows(index[0]), index[1]
        blocks = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
        bytes_NBX = self._read(place.key, place, (rows, blocks, slice(0, BLOCK // 2)), torch.uint8)
        scales_NB = self._read(place.key.replace("_blocks", "_scales"), place, (rows, blocks), torch.uint8)
        wide_NK = expand_mxfp4(bytes_NBX, scales_NB)
        return wide_NK[:, columns.start - blocks.start * BLOCK :][:, : columns.stop - columns.start]


def expand_mxfp4(bytes_NBX: Tensor, scales_NB: Tensor) -> Tensor:
    """float32 [N, 32 B] of blocks [N, B, 16] and scales [N, B]."""
    table = torch.tensor([*_FP4, *(-number for number in _FP4)])
    numbers_NB32 = table[torch.stack((bytes_NBX & 15, bytes_NBX >> 4), dim=-1).int()].flatten(2)
    return torch.ldexp(numbers_NB32, scales_NB[..., None].int() - _BIAS).flatten(1)
