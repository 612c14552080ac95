"""What the loader needs of a checkpoint file, whatever its format. Engine and worker processes."""

from typing import Protocol

import torch
from torch import Tensor

from model_runtime.quantized import QuantizedFormat, QuantizedMatrix

Index = tuple[slice, ...]
"""A part of a tensor: for each dimension, from where to where. Nothing is left open."""


def whole(shape: tuple[int, ...]) -> Index:
    """All of a tensor."""
    return tuple(slice(0, count) for count in shape)


class TensorSource(Protocol):
    """Tensors by their key in Hugging Face's naming. Keys that the format's table cannot translate appear as they are,
    so that the loader names them as unused."""

    def keys(self) -> frozenset[str]:
        """Every tensor of the checkpoint."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def dtype(self, key: str) -> torch.dtype:
        """What `read_into` fills: float32, float16 or bfloat16. Raises CheckpointError for another type."""
        ...

    def quantized(self, key: str) -> QuantizedFormat | None:
        """The format of a matrix of integers that `read_quantized` can give; None for other tensors."""
        ...

    def read_quantized(self, key: str, index: Index) -> QuantizedMatrix:
        """The part of a matrix of integers as it is stored; its bytes are not to be written to. Columns must begin and
        end with a block, rows with a head where they are those of heads."""
        ...

    def read_into(self, key: str, index: Index, target: Tensor) -> None:
        """Fill a contiguous CPU tensor of the part's shape with its numbers; converts to the target's dtype. Reads no
        more of the file than rows and, at block boundaries, columns."""
        ...
