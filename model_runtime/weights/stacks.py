"""Experts that a checkpoint has stacked in one tensor a layer: every expert's matrices by itself. Used by
`spelling.py`, engine and worker processes.

Rows of gate and up alternate (GPT-OSS), or gate's come first. Matrices are [E, K, N], the other way round than
everywhere else, with biases [E, N], or [E, N, K] (Qwen3-VL as transformers 5 writes it); or in MXFP4 (Open Compute
Project, microscaling formats 1.0), whose blocks of 32 numbers are 16 bytes of two, the first in the low half, with a
power of two as scale: [E, N, K / 32, 16] and [E, N, K / 32].

Legend: E experts, N rows and K columns of one expert's matrix.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.models.family import StackOrder
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


def unstacked(source: TensorSource, order: StackOrder, hidden_size: int) -> dict[str, StoredTensor]:
    """The tensors of a source, experts one by one. Raises CheckpointError for tensors that are not stacks."""
    found, last = dict[str, StoredTensor](), _Last()
    for key in sorted(source):
        matched = _KEY.fullmatch(key)
        if matched is None:
            found[key] = source[key]
            continue
        stack, (experts, projection, kind) = source[key], matched.groups()
        if len(stack.shape) != _DIMENSIONS[kind]:
            raise CheckpointError(f"{key} has shape {list(stack.shape)}, which is no stack of experts")
        parts, ending = _PARTS[projection], "bias" if kind == "_bias" else "weight"
        is_turned = kind == "" and not _is_upright(source, experts, hidden_size)
        for expert in range(0 if kind == "_scales" else stack.shape[0]):  # scales are read with their blocks
            for number, part in enumerate(parts):
                place = _Place(expert, number, len(parts), stack.shape[2 if is_turned else 1], order)
                name = f"{experts}.{expert}.{part}.{ending}"
                if kind == "_blocks":
                    found[name] = Mxfp4Expert(stack, _scales(source, key), place)
                else:
                    found[name] = _Turned(stack, place, last) if is_turned else _Upright(stack, place)
    return found


def _scales(source: TensorSource, key: str) -> StoredTensor:
    scales = source.get(key.replace("_blocks", "_scales"))
    if scales is None:
        raise CheckpointError(f"{key} has no scales beside it")
    return scales


def _is_upright(source: TensorSource, experts: str, hidden_size: int) -> bool:
    """Whether matrices are [E, N, K]. Where one of the two is square, the other one tells; where neither, both do."""
    gate_up, down = (source.get(f"{experts}.{projection}_proj") for projection in ("gate_up", "down"))
    if gate_up is None or down is None:
        return False
    turned = gate_up.shape[1] == hidden_size and down.shape[2] == hidden_size
    return not turned and gate_up.shape[2] == hidden_size and down.shape[1] == hidden_size


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of the rows of an expert's matrix or bias."""

    expert: int
    part: int
    parts: int
    num_rows: int
    """Of all parts."""
    order: StackOrder

    @property
    def count(self) -> int:
        """Rows of the part."""
        return self.num_rows // self.parts

    @property
    def step(self) -> slice:
        """Which of `rows` are the part's."""
        return slice(self.part, None, self.parts) if self.order == "alternating" else slice(None)

    def rows(self, index: slice) -> slice:
        """Where some of the part's rows are among all, others maybe between them."""
        if self.order == "alternating":
            return slice(index.start * self.parts, index.stop * self.parts)
        return slice(self.part * self.count + index.start, self.part * self.count + index.stop)


class _Upright(Numbers):
    """A matrix or bias of an expert, in the order of the file: a StoredTensor."""

    def __init__(self, stack: StoredTensor, place: _Place) -> None:
        self._stack, self._place = stack, place
        self.shape: tuple[int, ...] = (place.count, *stack.shape[2:])
        self.dtype, self.file = stack.dtype, stack.file

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        place = self._place
        part = (slice(place.expert, place.expert + 1), place.rows(index[0]), *index[1:])
        target.copy_(read(self._stack, part)[0, place.step])


class _Last:
    """The expert that was read last, whose rows [N, K] are kept: to read some of them means to read all, since they are
    columns in the file."""

    def __init__(self) -> None:
        self._what: tuple[StoredTensor, Index] | None = None
        self._rows_NK = torch.empty(0)

    def rows(self, stack: StoredTensor, expert: int, columns: slice) -> Tensor:
        """All of its rows."""
        part = (slice(expert, expert + 1), columns, slice(0, stack.shape[2]))
        if self._what is None or self._what[0] is not stack or self._what[1] != part:
            self._what, self._rows_NK = None, torch.empty(0)
            self._what, self._rows_NK = (stack, part), read(stack, part)[0].T
        return self._rows_NK


class _Turned(Numbers):
    """A matrix of an expert, whose rows are columns in the file: a StoredTensor."""

    def __init__(self, stack: StoredTensor, place: _Place, last: _Last) -> None:
        self._stack, self._place, self._last = stack, place, last
        self.shape: tuple[int, ...] = (place.count, stack.shape[1])
        self.dtype, self.file = stack.dtype, stack.file

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        rows_NK = self._last.rows(self._stack, self._place.expert, index[1])
        target.copy_(rows_NK[self._place.rows(index[0])][self._place.step])


class Mxfp4Expert(Numbers):
    """A matrix of an expert in MXFP4, whose numbers are bfloat16's: a StoredTensor."""

    dtype = torch.bfloat16

    def __init__(self, blocks: StoredTensor, scales: StoredTensor, place: _Place) -> None:
        """Some rows of a stack."""
        self._blocks, self._scales, self._place = blocks, scales, place
        self.shape: tuple[int, ...] = (place.count, blocks.shape[2] * BLOCK)
        self.file = blocks.file

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        rows, columns = self._place.rows(index[0]), index[1]
        blocks, expert = slice(columns.start // BLOCK, -(-columns.stop // BLOCK)), self._place.expert
        part = (slice(expert, expert + 1), rows, blocks)
        bytes_NBX = read(self._blocks, (*part, slice(0, BLOCK // 2)))[0, self._place.step]
        scales_NB = read(self._scales, part)[0, self._place.step]
        wide_NK = expand_mxfp4(bytes_NBX, scales_NB)
        target.copy_(wide_NK[:, columns.start - blocks.start * BLOCK :][:, : columns.stop - columns.start])


def expand_mxfp4(bytes_NBX: Tensor, scales_NB: Tensor) -> Tensor:
    """float32 [N, 32 B] of blocks [N, B, 16] and scales [N, B]."""
    table = torch.tensor([*_FP4, *(-number for number in _FP4)])
    numbers_NB32 = table[torch.stack((bytes_NBX & 15, bytes_NBX >> 4), dim=-1).int()].flatten(2)
    return torch.ldexp(numbers_NB32, scales_NB[..., None].int() - _BIAS).flatten(1)
