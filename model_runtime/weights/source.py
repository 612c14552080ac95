"""What the loader needs of a checkpoint file, whatever its format. Engine and worker processes."""

from typing import Protocol

import torch
from torch import Tensor

from model_runtime.quantized import QuantizedFormat, QuantizedMatrix


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

    def read_quantized(self, key: str) -> QuantizedMatrix:
        """A matrix of integers as it is stored; its bytes are not to be written to."""
        ...

    def read_into(self, key: str, target: Tensor) -> None:
        """Fill a contiguous CPU tensor of that shape with the tensor's numbers; converts to the target's dtype."""
        ...
