"""Matrices of integers with scales, in GGUF's formats: how they are laid out, made and expanded. Used by the loaders,
which keep a file's integers as they are, and by operations, engine and worker processes.

Blocks of 32 neighbouring numbers of a row share a scale (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).

Legend: N rows, K columns, R bytes of a row, B blocks, 32 numbers of a block.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

QuantizedFormat = Literal["q8_0", "q4_0", "q4_1"]

BLOCK = 32
"""Numbers that share a scale, in a matrix and in rows that are quantised for a product."""
_BLOCK_BYTES: Mapping[QuantizedFormat, int] = MappingProxyType({"q8_0": 34, "q4_0": 18, "q4_1": 20})
LARGEST_IN_ROW = 127 * 256
"""What the largest number of a block of a row becomes for a product: 16 bits. Rows of 8 bits would cost far more
accuracy than weights of 8 bits do, and change the embedded model's answers."""


def row_bytes(quantized: QuantizedFormat, num_columns: int) -> int:
    """R. The number of columns must be a multiple of 32."""
    assert num_columns % BLOCK == 0, f"{num_columns} columns are not blocks of {BLOCK}"
    return num_columns // BLOCK * _BLOCK_BYTES[quantized]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """A matrix [N, K] of integers.

    A row is its blocks: a float16 scale, in q4_1 also a float16 minimum, then 32 int8 numbers or 16 bytes with the
    first 16 numbers in their low halves.
    """

    data_NR: Tensor
    """uint8."""
    format: QuantizedFormat
    num_columns: int

    def __post_init__(self) -> None:
        expected = row_bytes(self.format, self.num_columns)
        assert self.data_NR.dtype == torch.uint8 and self.data_NR.shape[1] == expected, "bytes do not fit the format"

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.data_NR.shape[0])


def expand_blocks(quantized: QuantizedFormat, raw_BR: Tensor, out_B32: Tensor) -> None:
    """Blocks as float32, bit for bit as ggml defines them."""
    scale_B1 = raw_BR[:, :2].view(torch.float16).float()
    if quantized == "q8_0":
        out_B32.copy_(raw_BR[:, 2:].view(torch.int8)).mul_(scale_B1)
        return
    first = 4 if quantized == "q4_1" else 2
    out_B32[:, :16].copy_(raw_BR[:, first:] & 15)
    out_B32[:, 16:].copy_(raw_BR[:, first:] >> 4)
    if quantized == "q4_0":
        out_B32.sub_(8).mul_(scale_B1)
    else:
        out_B32.mul_(scale_B1).add_(raw_BR[:, 2:4].view(torch.float16).float())


def dequantize(matrix: QuantizedMatrix) -> Tensor:
    """[N, K] float32."""
    data_NR = matrix.data_NR.contiguous()
    out_NK = torch.empty(matrix.num_rows, matrix.num_columns, device=data_NR.device)
    expand_blocks(matrix.format, data_NR.view(-1, _BLOCK_BYTES[matrix.format]), out_NK.view(-1, BLOCK))
    return out_NK


def scales_are_finite(matrix: QuantizedMatrix) -> bool:
    """Whether all scales and minima are: then so is every number."""
    head = matrix.data_NR.contiguous().view(-1, _BLOCK_BYTES[matrix.format])[:, : 4 if matrix.format == "q4_1" else 2]
    return bool(head.contiguous().view(torch.float16).isfinite().all())


def quantize(weight_NK: Tensor, quantized: QuantizedFormat) -> QuantizedMatrix:
    """The nearest matrix of a symmetric format, q8_0 or q4_0. A scale is the largest number of a block / 127, in q4_0
    that / -8, as ggml chooses them."""
    assert quantized in ("q8_0", "q4_0"), f"{quantized} is not made here"
    weight_B32 = weight_NK.float().reshape(-1, BLOCK)
    largest_B1 = weight_B32.gather(1, weight_B32.abs().argmax(dim=1, keepdim=True))
    scale_B1 = largest_B1.abs() / 127 if quantized == "q8_0" else largest_B1 / -8
    stored_B1 = scale_B1.half()
    codes_B32 = _codes(weight_B32, stored_B1.float(), 127 if quantized == "q8_0" else 7).view(torch.uint8)
    if quantized == "q4_0":
        shifted_B32 = codes_B32 + 8
        codes_B32 = shifted_B32[:, :16] | shifted_B32[:, 16:] << 4
    blocks_BR = torch.cat((stored_B1.view(torch.uint8), codes_B32), dim=1)
    data_NR = blocks_BR.view(weight_NK.shape[0], -1)
    return QuantizedMatrix(data_NR=data_NR, format=quantized, num_columns=weight_NK.shape[1])


def _codes(numbers: Tensor, scale: Tensor, largest: int) -> Tensor:
    """int8: numbers / scale, rounded, in -largest - 1 .. largest; 0 where the scale is 0."""
    codes = (numbers / scale).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).round_()
    return codes.clamp_(-largest - 1, largest).to(torch.int8)


def quantize_rows(x_TK: Tensor) -> Tensor:
    """[T, K] in the type of x: what rows become that are quantised for a product, in blocks of 32 whose float32 scale
    is the largest number / LARGEST_IN_ROW: integers times scale. Not finite where a block is not."""
    blocks = x_TK.float().reshape(x_TK.shape[0], -1, BLOCK)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / LARGEST_IN_ROW
    codes = (blocks * (1 / scale)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).round_()
    return (codes.to(x_TK.dtype) * scale.to(x_TK.dtype)).view(x_TK.shape)
