"""Experts that a checkpoint has stacked in one tensor a layer: every expert's matrices by itself. Used by
`spelling.py`, engine and worker processes.

Rows of gate and up alternate (GPT-OSS), or gate's come first. Matrices are [E, K, N], the other way round than
everywhere else, with biases [E, N], or [E, N, K] (Qwen3-VL as transformers 5 writes it); or in MXFP4, blocks
[E, N, K / 32, 16] and exponents [E, N, K / 32].

Legend: E experts, N rows and K columns of one expert's matrix.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.models.family import StackOrder
from model_runtime.quantized import BLOCK
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.mxfp4 import Mxfp4
from model_runtime.weights.source import Index, LastRead, Numbers, StoredTensor, TensorSource, read

_KEY = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)")
_PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
_DIMENSIONS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}


def unstacked(source: TensorSource, order: StackOrder, hidden_size: int) -> dict[str, StoredTensor]:
    """The tensors of a source, experts one by one. Raises CheckpointError for tensors that are not stacks."""
    found, last = dict[str, StoredTensor](), LastRead()
    for key in sorted(source):
        matched = _KEY.fullmatch(key)
        if matched is None:
            found[key] = source[key]
            continue
        stack, (experts, projection, kind) = source[key], matched.groups()
        _check(key, stack, kind)
        parts, ending = _PARTS[projection], "bias" if kind == "_bias" else "weight"
        is_turned = kind == "" and not _is_upright(source, experts, hidden_size)
        for expert in range(0 if kind == "_scales" else stack.shape[0]):  # scales are read with their blocks
            for number, part in enumerate(parts):
                place = _Place(expert, number, len(parts), stack.shape[2 if is_turned else 1], order)
                name = f"{experts}.{expert}.{part}.{ending}"
                if kind == "_blocks":
                    found[name] = _mxfp4(stack, _scales(source, key), place)
                else:
                    found[name] = _Turned(stack, place, last) if is_turned else _Upright(stack, place)
    return found


def _check(key: str, stack: StoredTensor, kind: str) -> None:
    """Raises CheckpointError for a tensor that cannot be a stack of experts, whatever their sizes."""
    if len(stack.shape) != _DIMENSIONS[kind] or 0 in stack.shape:
        raise CheckpointError(f"{key} has shape {list(stack.shape)}, which is no stack of experts")
    if kind == "_blocks" and (stack.shape[3] != BLOCK // 2 or stack.dtype != torch.uint8):
        raise CheckpointError(f"{key} is {stack.dtype} {list(stack.shape)}, and not blocks of {BLOCK // 2} bytes")


def _scales(source: TensorSource, key: str) -> StoredTensor:
    """Of these blocks."""
    scales, shape = source.get(key.replace("_blocks", "_scales")), source[key].shape[:3]
    if scales is None:
        raise CheckpointError(f"{key} has no scales beside it")
    if scales.shape != shape or scales.dtype != torch.uint8:
        raise CheckpointError(
            f"the scales of {key} are {scales.dtype} {list(scales.shape)}, and not bytes {list(shape)}"
        )
    return scales


def _is_upright(source: TensorSource, experts: str, hidden_size: int) -> bool:
    """Whether matrices are [E, N, K]. Where one of the two is square, the other one tells; where neither, both do."""
    gate_up, down = (source.get(f"{experts}.{projection}_proj") for projection in ("gate_up", "down"))
    if gate_up is None or down is None or (len(gate_up.shape), len(down.shape)) != (3, 3):
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


class _Turned(Numbers):
    """A matrix of an expert, whose rows are columns in the file: a StoredTensor."""

    def __init__(self, stack: StoredTensor, place: _Place, last: LastRead) -> None:
        self._stack, self._place, self._last = stack, place, last
        self.shape: tuple[int, ...] = (place.count, stack.shape[1])
        self.dtype, self.file = stack.dtype, stack.file

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        expert = slice(self._place.expert, self._place.expert + 1)
        columns_1KN = self._last.read(self._stack, (expert, index[1], slice(0, self._stack.shape[2])))
        target.copy_(columns_1KN[0].T[self._place.rows(index[0])][self._place.step])


def _mxfp4(blocks: StoredTensor, scales: StoredTensor, place: _Place) -> Mxfp4:
    """A matrix of an expert."""
    expert = slice(place.expert, place.expert + 1)

    def read_blocks(rows: slice, part: slice) -> tuple[Tensor, Tensor]:
        index = (expert, place.rows(rows), part)
        bytes_1nb16 = read(blocks, (*index, slice(0, BLOCK // 2)))
        return bytes_1nb16[0, place.step], read(scales, index)[0, place.step]

    return Mxfp4((place.count, blocks.shape[2] * BLOCK), blocks.file, read_blocks)
