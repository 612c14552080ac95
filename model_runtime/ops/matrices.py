"""The meaning of packed matrices, in plain torch: how they are kept, and products with them. `reference.py` has the
other operations. Engine and worker processes.

Legend: T tokens, K input features, N output features.
"""

import torch
from torch import Tensor

from model_runtime.ops.registry import MatrixForm, PackedWeight, register
from model_runtime.quantized import FORMS, QuantizedMatrix, dequantize, quantize_rows, row_bytes


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type that numbers of `dtype` are computed in."""
    return torch.promote_types(dtype, torch.float32)


@register("empty_matrix", "any")
def empty_matrix(form: MatrixForm, device: torch.device) -> PackedWeight:
    """[N, K] in its storage type, or the bytes of its integers, which are expanded whenever they are used."""
    quantized = None if isinstance(form.stored, torch.dtype) else form.stored
    width = form.num_columns if quantized is None else row_bytes(quantized, form.num_columns)
    dtype = form.stored if isinstance(form.stored, torch.dtype) else torch.uint8
    is_integers = quantized is not None and not FORMS[quantized].are_floats
    return PackedWeight(
        data=torch.empty(form.num_rows, width, dtype=dtype, device=device),
        num_rows=form.num_rows,
        num_columns=form.num_columns,
        quantized=quantized,
        row_bits=form.row_bits if is_integers else 0,
    )


@register("fill_rows", "any")
def fill_rows(packed: PackedWeight, start: int, rows: Tensor | QuantizedMatrix) -> None:
    """Copied as they are."""
    source = rows if isinstance(rows, Tensor) else rows.data_NR
    assert packed.quantized == (None if isinstance(rows, Tensor) else rows.format), "rows of another form"
    packed.data[start : start + len(source)].copy_(source)


def expanded(weight: PackedWeight, data: Tensor) -> Tensor:
    """Rows of a packed matrix, or all of them, as floats."""
    if weight.quantized is None:
        return data
    return dequantize(QuantizedMatrix(data_NR=data, format=weight.quantized, num_columns=weight.num_columns))


@register("linear", "any")
def linear(x_TK: Tensor, weight: PackedWeight, bias_N: Tensor | None) -> Tensor:
    """[T, N] = x @ weight.T + bias in the type of x."""
    wide = wide_type(x_TK.dtype)
    bias = None if bias_N is None else bias_N.to(wide)
    rows_TK = x_TK.to(wide)
    if weight.row_bits:
        rows_TK = quantize_rows(rows_TK, weight.row_bits)
    return torch.nn.functional.linear(rows_TK, expanded(weight, weight.data).to(wide), bias).to(x_TK.dtype)


@register("embedding", "any")
def embedding(ids_T: Tensor, table: PackedWeight) -> Tensor:
    """[T, K] rows of the table, float32 or float64."""
    rows_TK = expanded(table, table.data[ids_T])
    return rows_TK.to(wide_type(rows_TK.dtype))
