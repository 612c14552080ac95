"""Experts that a checkpoint has stacked in one tensor a layer, as GPT-OSS's has: every expert's matrices by itself.
Used by `spelling.py`, engine and worker processes.

Rows of gate and up alternate. Matrices are [E, K, N], the other way round than everywhere else, with biases [E, N]; or
in MXFP4 (Open Compute Project, microscaling formats 1.0), whose blocks of 32 numbers are 16 bytes of two, the first in
the low half, with a power of two as scale: [E, N, K / 32, 16] and [E, N, K / 32].

Legend: E experts, N rows and K columns of one expert's matrix.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.quantized import BLOCK
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.source import Index, Numbers, StoredTensor, TensorSource, read

_KEY = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)")
_PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
_DIMENSIONS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign."""
_BIAS = 127
"""What a scale stands for is 2 to the power of its byte less this."""


def unstacked(source: TensorSource) -> dict[str, StoredTensor]:
    """The tensors of a source, experts one by one. Raises CheckpointError for tensors that are not stacks."""
    found: dict[str, StoredTensor] = {}
    for key in sorted(source):
        matched = _KEY.fullmatch(key)
        if matched is None:
            found[key] = source[key]
        elif len(shape := source[key].shape) != _DIMENSIONS[matched[3]]:
            raise CheckpointError(f"{key} has shape {list(shape)}, which is no stack of experts")
        elif matched[3] != "_scales":  # read with its blocks
            found |= _experts(source, key, *matched.groups())
    return found


def _experts(source: TensorSource, key: str, experts: str, projection: str, kind: str) -> dict[str, StoredTensor]:
    scales = source.get(key.replace("_blocks", "_scales"))
    if kind == "_blocks" and scales is None:
        raise CheckpointError(f"{key} has no scales beside it")
    parts, ending, found = _PARTS[projection], "bias" if kind == "_bias" else "weight", dict[str, StoredTensor]()
    for expert in range(source[key].shape[0]):
        last = _Turned(source[key], expert)
        for first, part in enumerate(parts):
            place = _Place(expert, first, len(parts))
            name = f"{experts}.{expert}.{part}.{ending}"
            if kind == "_blocks" and scales is not None:
                found[name] = Mxfp4Expert(source[key], scales, place)
            else:
                found[name] = _Bias(source[key], place) if kind == "_bias" else _Expert(last, place)
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    """Every `step`-th row of an expert's matrix or bias, from `first` on."""

    expert: int
    first: int
    step: int

    def rows(self, index: slice) -> slice:
        """Where some of the rows are among all of the stack."""
        return slice(index.start * self.step, index.stop * self.step)


class _Bias(Numbers):
    """Biases of an expert: a StoredTensor."""

    def __init__(self, stack: StoredTensor, place: _Place) -> None:
        self._stack, self._place = stack, place
        self.shape: tuple[int, ...] = (stack.shape[1] // place.step,)
        self.dtype, self.file = stack.dtype, stack.file

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        place = self._place
        rows_1N = read(self._stack, (slice(place.expert, place.expert + 1), place.rows(index[0])))
        target.copy_(rows_1N[0, place.first :: place.step])


class _Turned:
    """An expert of a stack, of which the rows [N, K] are kept between two readings: to read some of them means to read
    all, since they are columns in the file."""

    def __init__(self, stack: StoredTensor, expert: int) -> None:
        self.stack, self._expert = stack, expert
        self._last: tuple[slice, Tensor] | None = None

    def rows(self, rows: slice, columns: slice) -> Tensor:
        """Some of the rows; after the last ones nothing is kept."""
        num_rows = self.stack.shape[2]
        if self._last is None or self._last[0] != columns:
            expert = slice(self._expert, self._expert + 1)
            self._last = columns, read(self.stack, (expert, columns, slice(0, num_rows)))[0].T
        rows_NK = self._last[1][rows]
        if rows.stop == num_rows:
            self._last = None
        return rows_NK


class _Expert(Numbers):
    """A matrix of an expert: a StoredTensor."""

    def __init__(self, turned: _Turned, place: _Place) -> None:
        self._turned, self._place = turned, place
        self.shape: tuple[int, ...] = (turned.stack.shape[2] // place.step, turned.stack.shape[1])
        self.dtype, self.file = turned.stack.dtype, turned.stack.file

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        rows_NK = self._turned.rows(self._place.rows(index[0]), index[1])
        target.copy_(rows_NK[self._place.first :: self._place.step])


class Mxfp4Expert(Numbers):
    """A matrix of an expert in MXFP4, whose numbers are bfloat16's: a StoredTensor."""

    dtype = torch.bfloat16

    def __init__(self, blocks: StoredTensor, scales: StoredTensor, place: _Place) -> None:
        """Some rows of a stack."""
        self._blocks, self._scales, self._place = blocks, scales, place
        self.shape: tuple[int, ...] = (blocks.shape[1] // place.step, blocks.shape[2] * BLOCK)
        self.file = blocks.file

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        rows, columns = self._place.rows(index[0]), index[1]
        blocks, expert = slice(columns.start // BLOCK, -(-columns.stop // BLOCK)), self._place.expert
        part = (slice(expert, expert + 1), rows, blocks)
        bytes_NBX = read(self._blocks, (*part, slice(0, BLOCK // 2)))[0, self._place.first :: self._place.step]
        scales_NB = read(self._scales, part)[0, self._place.first :: self._place.step]
        wide_NK = expand_mxfp4(bytes_NBX, scales_NB)
        target.copy_(wide_NK[:, columns.start - blocks.start * BLOCK :][:, : columns.stop - columns.start])


def expand_mxfp4(bytes_NBX: Tensor, scales_NB: Tensor) -> Tensor:
    """float32 [N, 32 B] of blocks [N, B, 16] and scales [N, B]."""
    table = torch.tensor([*_FP4, *(-number for number in _FP4)])
    numbers_NB32 = table[torch.stack((bytes_NBX & 15, bytes_NBX >> 4), dim=-1).int()].flatten(2)
    return torch.ldexp(numbers_NB32, scales_NB[..., None].int() - _BIAS).flatten(1)
