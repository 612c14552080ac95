"""Matrices in MXFP4, of GPT-OSS's stacks and of compressed-tensors: blocks of 32 numbers are 16 bytes of two, the first
in the low half, with a byte of an exponent. Used by `stacks.py` and `matrices.py`, engine and worker processes.

Legend: N rows, K columns of a matrix, B blocks of a row; n, k those of a part.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model_runtime.matrix_scheme import MatrixScheme
from model_runtime.quantized import BLOCK, FORMS, QuantizedFormat, QuantizedMatrix, dequantize, join_blocks
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.source import Index, TensorSource, read

ReadBlocks = Callable[[slice, slice], tuple[Tensor, Tensor]]
"""(rows, blocks) -> (bytes [n, b, 16], exponents [n, b])."""


class Mxfp4:
    """A matrix in MXFP4: a StoredTensor."""

    dtype = FORMS["mxfp4"].exact_in
    format: QuantizedFormat | None = "mxfp4"

    def __init__(self, shape: tuple[int, int], file: str, read_blocks: ReadBlocks) -> None:
        self.shape: tuple[int, ...] = shape
        self.file, self._read_blocks = file, read_blocks

    def read_quantized(self, index: Index) -> QuantizedMatrix:
        """As in StoredTensor."""
        rows, columns = index
        bytes_nb16, exponents_nb = self._read_blocks(rows, slice(columns.start // BLOCK, -(-columns.stop // BLOCK)))
        codes_nk = torch.stack((bytes_nb16 & 15, bytes_nb16 >> 4), dim=-1).flatten(1)
        return join_blocks("mxfp4", (exponents_nb,), codes_nk)

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        wide_nk = dequantize(self.read_quantized(index))
        start = index[1].start % BLOCK
        target.copy_(wide_nk[:, start : start + index[1].stop - index[1].start])


def compressed_mxfp4(module: str, source: TensorSource, scheme: MatrixScheme) -> Mxfp4:
    """Of compressed-tensors: `weight_packed` [N, K / 2] and `weight_scale` [N, B]. Raises CheckpointError."""
    numbers, key = source[f"{module}.weight_packed"], f"{module}.weight_scale"
    num_rows, num_bytes = numbers.shape
    blocks = num_bytes * 2 // BLOCK
    if scheme.block != (1, BLOCK) or num_bytes * 2 % BLOCK:
        raise CheckpointError(f"{module}: {num_bytes * 2} columns in blocks of {scheme.block[1]}, not of {BLOCK}")
    if key not in source or source[key].shape != (num_rows, blocks) or source[key].dtype != torch.uint8:
        raise CheckpointError(
            f"{module}.weight_packed has no weight_scale [{num_rows}, {blocks}] of exponents beside it"
        )
    exponents = source[key]

    def read_blocks(rows: slice, part: slice) -> tuple[Tensor, Tensor]:
        columns = slice(part.start * BLOCK // 2, part.stop * BLOCK // 2)
        bytes_nb16 = read(numbers, (rows, columns)).view(-1, part.stop - part.start, BLOCK // 2)
        return bytes_nb16, read(exponents, (rows, part))

    return Mxfp4((num_rows, num_bytes * 2), numbers.file, read_blocks)
