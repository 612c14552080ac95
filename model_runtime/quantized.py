"""Matrices of integers, or of floats of 8 and 4 bits, with scales: how they are laid out, made and expanded. Used by
the loaders, which keep a file's numbers as they are, and by operations, engine and worker processes.

Neighbouring numbers of a row, a block, share a scale. Those of GGUF are laid out as in its files
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).

Legend: N rows, K columns, R bytes of a row, B blocks, X numbers of a block, 32 of those that rows share.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from model_runtime.k_quants import expand_q4_k, expand_q6_k, factors

QuantizedFormat = Literal["q8_0", "q4_0", "q4_1", "q4_z", "mxfp4", "q4_k", "q6_k", "fp8"]

BLOCK = 32
"""Numbers that share a scale in most formats, and in rows that are quantised for a product."""
RowBits = Literal[0, 8, 16]
"""Of the integers that rows become for a product with a matrix of integers; 0: they stay floats."""
LARGEST_IN_ROW: Mapping[RowBits, int] = MappingProxyType({8: 127, 16: 127 * 256})
"""What the largest number of a block of a row becomes for a product. Rows of 8 bits cost far more accuracy than weights
of 8 bits do, and change the embedded model's answers."""
E4M3_NAN = 127
"""The lower seven bits of what is no number."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """A block: what is in front, then the numbers."""

    numbers: int
    head: int
    """Bytes in front of the numbers."""
    head_dtype: torch.dtype
    """Of what is there: a scale, in some formats a second number."""
    bits: int
    """Of a number: 8, or 4, which are 16 bytes with the first 16 numbers in their low halves. In `k_quants.py` they lie
    in other ways, and `head` counts all that is not numbers."""
    are_floats: bool = False
    """Rows are not quantised for products with them."""
    exact_in: torch.dtype = torch.float32
    """What holds its numbers."""

    @property
    def num_bytes(self) -> int:
        """Of a block."""
        return self.head + self.numbers * self.bits // 8


FORMS: Mapping[QuantizedFormat, BlockForm] = MappingProxyType(
    {
        "q8_0": BlockForm(32, 2, torch.float16, 8),
        "q4_0": BlockForm(32, 2, torch.float16, 4),
        "q4_1": BlockForm(32, 4, torch.float16, 4),
        "q4_z": BlockForm(32, 4, torch.float16, 4),
        "mxfp4": BlockForm(32, 1, torch.uint8, 4, exact_in=torch.bfloat16),
        "q4_k": BlockForm(256, 16, torch.float16, 4),
        "q6_k": BlockForm(256, 18, torch.float16, 6),
        "fp8": BlockForm(128, 4, torch.float32, 8, are_floats=True),
    }
)
"""q8_0: integers times the scale. q4_0: less 8, times the scale. q4_1: times the scale, plus a minimum. q4_z: less a
zero point, times the scale; as AWQ and GPTQ have it, which q4_1 could not hold exactly. fp8: E4M3 times a float32 scale
(arXiv 2209.05433). mxfp4: E2M1 times a power of two, of which the exponent is stored (Open Compute Project,
microscaling formats 1.0)."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign."""
EXPONENT_BIAS, LARGEST_EXPONENT = 127, 252
"""What is subtracted from a stored exponent, and with which every number of E2M1 is still one of float32."""


def row_bytes(quantized: QuantizedFormat, num_columns: int) -> int:
    """R. The number of columns must be a multiple of a block."""
    form = FORMS[quantized]
    assert num_columns % form.numbers == 0, f"{num_columns} columns are not blocks of {form.numbers}"
    return num_columns // form.numbers * form.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """A matrix [N, K]. A row is its blocks."""

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


def join_blocks(quantized: QuantizedFormat, heads_NB: tuple[Tensor, ...], codes_NK: Tensor) -> QuantizedMatrix:
    """Of what is in front of each block, and all numbers as unsigned bytes."""
    form = FORMS[quantized]
    num_rows, num_columns = codes_NK.shape
    codes_BX = codes_NK.reshape(-1, form.numbers)
    if form.bits == 4:
        codes_BX = codes_BX[:, :16] | codes_BX[:, 16:] << 4
    head_B = torch.stack([head.reshape(-1).to(form.head_dtype) for head in heads_NB], dim=1)
    blocks_BR = torch.cat((head_B.view(torch.uint8), codes_BX), dim=1)
    return QuantizedMatrix(data_NR=blocks_BR.view(num_rows, -1), format=quantized, num_columns=num_columns)


def expand_blocks(quantized: QuantizedFormat, raw_BR: Tensor, out_BX: Tensor) -> None:
    """Blocks as float32, bit for bit as their format defines them."""
    if quantized in ("q4_k", "q6_k"):
        return (expand_q4_k if quantized == "q4_k" else expand_q6_k)(raw_BR, out_BX)
    form = FORMS[quantized]
    head_BH = raw_BR[:, : form.head].contiguous().view(form.head_dtype).float()
    if quantized == "mxfp4":
        head_BH = torch.ldexp(torch.ones_like(head_BH), raw_BR[:, :1].int() - EXPONENT_BIAS)
    scale_B1, second_B1, codes = head_BH[:, :1], head_BH[:, 1:], raw_BR[:, form.head :]
    if form.bits == 8:
        out_BX.copy_(codes.view(torch.float8_e4m3fn if quantized == "fp8" else torch.int8)).mul_(scale_B1)
        return
    out_BX[:, :16].copy_(codes & 15)
    out_BX[:, 16:].copy_(codes >> 4)
    match quantized:
        case "q4_0":
            out_BX.sub_(8).mul_(scale_B1)
        case "q4_1":
            out_BX.mul_(scale_B1).add_(second_B1)
        case "mxfp4":
            table = torch.tensor((*E2M1, *(-number for number in E2M1)), device=out_BX.device)
            out_BX.copy_(table[out_BX.int()]).mul_(scale_B1)
        case "q4_z":
            out_BX.sub_(second_B1).mul_(scale_B1)


def dequantize(matrix: QuantizedMatrix) -> Tensor:
    """[N, K] float32."""
    form, data_NR = FORMS[matrix.format], matrix.data_NR.contiguous()
    out_NK = torch.empty(matrix.num_rows, matrix.num_columns, device=data_NR.device)
    expand_blocks(matrix.format, data_NR.view(-1, form.num_bytes), out_NK.view(-1, form.numbers))
    return out_NK


def is_finite(matrix: QuantizedMatrix) -> bool:
    """Whether every number is."""
    form = FORMS[matrix.format]
    raw_BR = matrix.data_NR.contiguous().view(-1, form.num_bytes)
    if matrix.format in ("q4_k", "q6_k"):
        return bool(factors(matrix.format, raw_BR).isfinite().all())
    head_BH = raw_BR[:, : form.head].contiguous().view(form.head_dtype)
    if matrix.format == "fp8" and bool(((raw_BR[:, form.head :] & E4M3_NAN) == E4M3_NAN).any()):
        return False
    if matrix.format == "mxfp4":
        return not bool((head_BH > LARGEST_EXPONENT).any())
    return bool(head_BH.isfinite().all())


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
        codes_B32 = codes_B32 + 8
    return join_blocks(quantized, (stored_B1,), codes_B32.view(weight_NK.shape))


def _codes(numbers: Tensor, scale: Tensor, largest: int) -> Tensor:
    """int8: numbers / scale, rounded, in -largest - 1 .. largest; 0 where the scale is 0."""
    codes = (numbers / scale).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).round_()
    return codes.clamp_(-largest - 1, largest).to(torch.int8)


def fewest_row_bits(bits: Iterable[RowBits]) -> RowBits:
    """Of rows for several matrices; 0 where none are quantised."""
    return min((each for each in bits if each), default=0)


def quantize_rows(x_TK: Tensor, bits: RowBits) -> Tensor:
    """[T, K] in the type of x: what rows become that are quantised for a product, in blocks of 32 whose float32 scale
    is the largest number / LARGEST_IN_ROW: integers times scale. Not finite where a block is not."""
    blocks = x_TK.float().reshape(x_TK.shape[0], -1, BLOCK)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / LARGEST_IN_ROW[bits]
    codes = (blocks * (1 / scale)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).round_()
    return (codes.to(x_TK.dtype) * scale.to(x_TK.dtype)).view(x_TK.shape)
