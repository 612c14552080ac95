"""Matrices of integers, or of floats of 8 and 4 bits, with scales: how they are laid out, made and expanded. Used by
the loaders, which keep a file's numbers as they are, and by operations, engine and worker processes.

Neighbouring numbers of a row, a block, share a scale. Those of GGUF are laid out as in its files
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).

Legend: N rows, K columns, R bytes of a row, B blocks, X numbers of a block, 32 of those that rows share, G groups of
blocks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from model_runtime.k_quants import expand_q4_k, expand_q6_k, factors

QuantizedFormat = Literal["q8_0", "q4_0", "q4_0_128", "q4_1", "q4_z", "q4_z_128", "mxfp4", "q4_k", "q6_k", "fp8"]

BLOCK = 32
"""Numbers that share a scale in most formats, and in rows that are quantised for a product."""
RowBits = Literal[0, 8, 16]
"""Of the integers that rows become for a product with a matrix of integers; 0: they stay floats."""
LARGEST_IN_ROW: Mapping[RowBits, int] = MappingProxyType({8: 127, 16: 127 * 256})
"""What the largest number of a block of a row becomes for a product. Rows of 8 bits cost more accuracy than weights of
8 bits do, and change the embedded model's answers."""
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
    shared: int = 1
    """Blocks that have what is in front in common, a group. If several, what is in front of all groups of a row comes
    before all its numbers, and the last group may be of fewer blocks."""
    repeated: QuantizedFormat | None = None
    """Of a format with groups the one in which each block has its own."""

    @property
    def num_bytes(self) -> int:
        """Of a block."""
        return self.head + self.numbers * self.bits // 8

    @property
    def group(self) -> int:
        """Numbers of a group."""
        return self.numbers * self.shared


FORMS: Mapping[QuantizedFormat, BlockForm] = MappingProxyType(
    {
        "q8_0": BlockForm(32, 2, torch.float16, 8),
        "q4_0": BlockForm(32, 2, torch.float16, 4),
        "q4_0_128": BlockForm(32, 2, torch.float16, 4, shared=4, repeated="q4_0"),
        "q4_1": BlockForm(32, 4, torch.float16, 4),
        "q4_z": BlockForm(32, 4, torch.float16, 4),
        "q4_z_128": BlockForm(32, 4, torch.float16, 4, shared=4, repeated="q4_z"),
        "mxfp4": BlockForm(32, 1, torch.uint8, 4, exact_in=torch.bfloat16),
        "q4_k": BlockForm(256, 16, torch.float16, 4),
        "q6_k": BlockForm(256, 18, torch.float16, 6),
        "fp8": BlockForm(128, 4, torch.float32, 8, are_floats=True),
    }
)
"""q8_0: integers times the scale. q4_0: less 8, times the scale. q4_1: times the scale, plus a minimum. q4_z: less a
zero point, times the scale; as AWQ and GPTQ have it, which q4_1 could not hold exactly. q4_0_128, q4_z_128: the same,
four blocks with one scale, and zero point. fp8: E4M3 times a float32 scale (arXiv 2209.05433). mxfp4: E2M1 times a
power of two, of which the exponent is stored (Open Compute Project, microscaling formats 1.0)."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign."""
EXPONENT_BIAS, LARGEST_EXPONENT = 127, 252
"""What is subtracted from a stored exponent, and with which every number of E2M1 is still one of float32."""


def row_bytes(quantized: QuantizedFormat, num_columns: int) -> int:
    """R. The number of columns must be a multiple of a block."""
    form = FORMS[quantized]
    assert num_columns % form.numbers == 0, f"{num_columns} columns are not blocks of {form.numbers}"
    return num_groups(quantized, num_columns) * form.head + num_columns * form.bits // 8


def num_groups(quantized: QuantizedFormat, num_columns: int) -> int:
    """G of a row."""
    return -(-num_columns // FORMS[quantized].group)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """A matrix [N, K]. A row is its blocks, or what is in front of its groups and then its numbers."""

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


def join_blocks(quantized: QuantizedFormat, heads_NG: tuple[Tensor, ...], codes_NK: Tensor) -> QuantizedMatrix:
    """Of what is in front of each block or group, and all numbers as unsigned bytes."""
    form = FORMS[quantized]
    num_rows, num_columns = codes_NK.shape
    codes_NBX = codes_NK.reshape(num_rows, -1, form.numbers)
    if form.bits == 4:
        codes_NBX = codes_NBX[..., :16] | codes_NBX[..., 16:] << 4
    head_NGH = torch.stack([head.reshape(num_rows, -1).to(form.head_dtype) for head in heads_NG], dim=-1)
    return _rows_of(quantized, head_NGH.view(torch.uint8), codes_NBX, num_columns)


def _rows_of(quantized: QuantizedFormat, heads_NGH: Tensor, codes_NBX: Tensor, num_columns: int) -> QuantizedMatrix:
    if FORMS[quantized].shared == 1:
        data_NR = torch.cat((heads_NGH, codes_NBX), dim=2).flatten(1)
    else:
        data_NR = torch.cat((heads_NGH.flatten(1), codes_NBX.flatten(1)), dim=1)
    return QuantizedMatrix(data_NR=data_NR, format=quantized, num_columns=num_columns)


def columns_of(matrix: QuantizedMatrix, columns: slice, stored: QuantizedFormat) -> QuantizedMatrix:
    """Whole blocks of a matrix with groups, from the beginning of a group on; or, stored in the format without, from
    anywhere on, each with what is in front of its group."""
    form = FORMS[matrix.format]
    assert stored in (matrix.format, form.repeated), f"{matrix.format} does not become {stored}"
    assert columns.start % FORMS[stored].group == 0, f"column {columns.start} is inside a block or group"
    front = num_groups(matrix.format, matrix.num_columns) * form.head
    heads_NGH = matrix.data_NR[:, :front].reshape(matrix.num_rows, -1, form.head)
    codes_NBX = matrix.data_NR[:, front:].reshape(matrix.num_rows, -1, form.numbers * form.bits // 8)
    if stored != matrix.format:
        heads_NGH = heads_NGH.repeat_interleave(form.shared, dim=1)
    groups = slice(columns.start // FORMS[stored].group, -(-columns.stop // FORMS[stored].group))
    blocks = slice(columns.start // form.numbers, columns.stop // form.numbers)
    return _rows_of(stored, heads_NGH[:, groups], codes_NBX[:, blocks], columns.stop - columns.start)


def _blocks_of(matrix: QuantizedMatrix) -> tuple[QuantizedFormat, Tensor]:
    """Its blocks [N B, bytes] as a format has them in which nothing is in common."""
    if (of_blocks := FORMS[matrix.format].repeated) is not None:
        matrix = columns_of(matrix, slice(0, matrix.num_columns), of_blocks)
    return matrix.format, matrix.data_NR.contiguous().view(-1, FORMS[matrix.format].num_bytes)


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
    stored, raw_BR = _blocks_of(matrix)
    out_NK = torch.empty(matrix.num_rows, matrix.num_columns, device=raw_BR.device)
    expand_blocks(stored, raw_BR, out_NK.view(-1, FORMS[stored].numbers))
    return out_NK


def is_finite(matrix: QuantizedMatrix) -> bool:
    """Whether every number is."""
    stored, raw_BR = _blocks_of(matrix)
    form = FORMS[stored]
    if stored in ("q4_k", "q6_k"):
        return bool(factors(stored, raw_BR).isfinite().all())
    head_BH = raw_BR[:, : form.head].contiguous().view(form.head_dtype)
    if stored == "fp8" and bool(((raw_BR[:, form.head :] & E4M3_NAN) == E4M3_NAN).any()):
        return False
    if stored == "mxfp4":
        return not bool((head_BH > LARGEST_EXPONENT).any())
    return bool(head_BH.isfinite().all())


def quantize(weight_NK: Tensor, quantized: QuantizedFormat) -> QuantizedMatrix:
    """The nearest matrix of a symmetric format: q8_0, q4_0 or q4_0_128. A scale is the largest number of a block or
    group / 127, of 4 bits that / -8, as ggml chooses them."""
    assert quantized in ("q8_0", "q4_0", "q4_0_128"), f"{quantized} is not made here"
    form, (num_rows, num_columns) = FORMS[quantized], weight_NK.shape
    padded_NK = torch.nn.functional.pad(weight_NK.float(), (0, -num_columns % form.group))
    weight_GX = padded_NK.reshape(-1, form.group)
    largest_G1 = weight_GX.gather(1, weight_GX.abs().argmax(dim=1, keepdim=True))
    scale_G1 = largest_G1.abs() / 127 if form.bits == 8 else largest_G1 / -8
    stored_G1 = scale_G1.half()
    codes_GX = _codes(weight_GX, stored_G1.float(), 127 if form.bits == 8 else 7).view(torch.uint8)
    if form.bits == 4:
        codes_GX = codes_GX + 8
    codes_NK = codes_GX.view(padded_NK.shape)[:, :num_columns]
    return join_blocks(quantized, (stored_G1.view(num_rows, -1),), codes_NK)


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
