"""Matrices of floats of 8 bits with scales, as DeepSeek-V3 and compressed-tensors store them. Used by `matrices.py`,
engine and worker processes."""

import torch
from torch import Tensor

from model_runtime.matrix_scheme import MatrixScheme
from model_runtime.quantized import FORMS, QuantizedMatrix, join_blocks
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.grids import EXPANDED, Scales, format_of
from model_runtime.weights.source import Index, StoredTensor, TensorSource, read

SCALES = ("weight_scale_inv", "weight_scale")
SPAN = FORMS["fp8"].numbers
"""Columns that share a scale at least, where numbers are kept as they are."""


class ScaledFloats:
    """A matrix [N, K] of E4M3 times scales: a StoredTensor."""

    dtype = EXPANDED

    def __init__(self, module: str, source: TensorSource, scheme: MatrixScheme) -> None:
        """Raises CheckpointError where the scales are missing or do not fit."""
        self._numbers: StoredTensor = source[f"{module}.weight"]
        names = [f"{module}.{name}" for name in SCALES if f"{module}.{name}" in source]
        if len(names) != 1:
            raise CheckpointError(f"{module}.weight is no matrix with one of {', '.join(SCALES)} beside it")
        num_rows, num_columns = self._numbers.shape
        self.shape: tuple[int, ...] = (num_rows, num_columns)
        self._scales = Scales(names[0], source[names[0]], (num_rows, num_columns), scheme.block)
        self.file, self.format = self._numbers.file, format_of(scheme, num_columns)

    def read_quantized(self, index: Index) -> QuantizedMatrix:
        """As in StoredTensor."""
        numbers_nk = read(self._numbers, index)
        places = torch.arange(index[1].start, index[1].stop, SPAN) // self._scales.columns
        return join_blocks("fp8", (self._scales.of(index[0])[:, places],), numbers_nk.view(torch.uint8))

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        places = torch.arange(index[1].start, index[1].stop) // self._scales.columns
        target.copy_(read(self._numbers, index).float() * self._scales.of(index[0])[:, places])
