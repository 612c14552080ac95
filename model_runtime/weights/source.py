"""What the loader needs of a checkpoint, whatever its format: its tensors by Hugging Face's keys. Engine and worker
processes.

Formats translate their own names to these; keys that a table cannot translate appear as they are, so that the loader
names them as unused. Views of other tensors (rows of one, an expert of a stack, numbers and their scales) are tensors
too.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from model_runtime.quantized import QuantizedFormat, QuantizedMatrix
from model_runtime.weights.errors import AGAIN, CheckpointError

Index = tuple[slice, ...]
"""A part of a tensor: for each dimension, from where to where. Nothing is left open."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Types that numbers of a model are kept in."""

ROWS_AT_ONCE = 256
"""Of matrices that are compared."""


def whole(shape: tuple[int, ...]) -> Index:
    """All of a tensor."""
    return tuple(slice(0, count) for count in shape)


def shape_of(index: Index) -> tuple[int, ...]:
    """Of a part."""
    return tuple(part.stop - part.start for part in index)


class StoredTensor(Protocol):
    """A tensor of a checkpoint, of which parts are read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Known without reading it."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers; where they have to be computed, that of what is computed."""
        ...

    @property
    def file(self) -> str:
        """The name of the file that has it."""
        ...

    @property
    def format(self) -> QuantizedFormat | None:
        """What `read_quantized` gives of it; None: it is no matrix of integers with scales."""
        ...

    def read_quantized(self, index: Index) -> QuantizedMatrix:
        """A part of a matrix of integers as it is stored; its bytes are not to be written to. Columns must begin and
        end with a block."""
        ...

    def read_into(self, index: Index, target: Tensor) -> None:
        """Fill a contiguous CPU tensor of the part's shape with its numbers; converts to the target's dtype. Reads no
        more of the file than rows and, at block boundaries, columns. Raises CheckpointError."""
        ...


class Numbers:
    """What tensors have in common that are no matrices of integers with scales."""

    @property
    def format(self) -> QuantizedFormat | None:
        """None."""
        return None

    def read_quantized(self, index: Index) -> QuantizedMatrix:
        """Never called, since there is no format."""
        raise AssertionError(f"{self} holds no blocks of integers")


TensorSource = Mapping[str, StoredTensor]
"""Every tensor of a checkpoint, or of a side of it."""


def read(tensor: StoredTensor, index: Index, dtype: torch.dtype | None = None) -> Tensor:
    """A part of a tensor, in its own type or another."""
    target = torch.empty(shape_of(index), dtype=dtype or tensor.dtype)
    tensor.read_into(index, target)
    return target


def equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two matrices are stored alike and hold the same numbers; reads of them until they differ."""
    if (first.shape, first.dtype) != (second.shape, second.dtype) or first.format or second.format:
        return False
    parts = (slice(at, min(at + ROWS_AT_ONCE, first.shape[0])) for at in range(0, first.shape[0], ROWS_AT_ONCE))
    return all(torch.equal(*(read(each, (rows, *whole(each.shape)[1:])) for each in (first, second))) for rows in parts)


class LastRead:
    """The part that was read last of tensors that have columns first, where reading some rows means reading all: it is
    kept for the rows that are asked for next. The tensors of a source share one of these, so that nothing else is."""

    def __init__(self) -> None:
        self._what: tuple[StoredTensor, Index] | None = None
        self._numbers = torch.empty(0)

    def read(self, tensor: StoredTensor, index: Index) -> Tensor:
        """As `read` gives it; not to be written to."""
        if self._what is None or self._what[0] is not tensor or self._what[1] != index:
            self._what, self._numbers = None, torch.empty(0)
            self._numbers = read(tensor, index)
            self._what = tensor, index
        return self._numbers


def check_float(key: str, tensor: StoredTensor) -> None:
    """Raises CheckpointError for a tensor whose type numbers of a model are not kept in."""
    if tensor.dtype not in FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        stored = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{key} is stored as {stored}; {names} are supported")


def check_finite(key: str, tensor: StoredTensor, numbers: Tensor) -> None:
    """Raises CheckpointError where numbers that were read of a tensor are not finite."""
    if not torch.isfinite(numbers.sum(dtype=torch.float32)):
        raise CheckpointError(f"NaN or infinite weights in {key} ({tensor.file}): {AGAIN}")
