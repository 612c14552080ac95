"""Operations on CPU in compiled code: float32 activations, weights in float32, bfloat16 or float16. Registered for
'cpu'; called by models through `Ops`. Those of attention are in `cpu_attention`. Engine and worker processes.

Every result is batch invariant: the number for a row does not depend on the other rows, on how a prompt was cut into
steps, or on the number of threads. Shapes and types are asserted; numbers from the batch that index memory are checked
in the kernels.

Legend: see `registry`.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from model_runtime.kernels.library import library
from model_runtime.ops.registry import PANEL_ROWS, Activation, MatrixForm, PackedWeight, register
from model_runtime.quantized import FORMS, QuantizedFormat, QuantizedMatrix, dequantize

STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""How the kernels number the storage types."""
QUANTIZED_STORAGE: Mapping[QuantizedFormat, int] = {
    **{"fp8": 3, "q8_0": 4, "q4_0": 5, "q4_1": 6, "q4_z": 7},
    **{"mxfp4": 8, "q4_k": 9, "q6_k": 10, "q4_0_128": 11, "q4_z_128": 12},
}
"""The same for numbers with scales."""
ACTIVATIONS: Mapping[Activation, int] = {
    "gelu": 0,
    "gelu_tanh": 1,
    "quick_gelu": 2,
    "silu": 3,
    "tanh": 4,
    "exp": 5,
    "sigmoid": 6,
    "softplus": 7,
}
"""How the kernels number the functions."""


def assert_plain(*tensors: Tensor) -> None:
    """What the kernels read and write: contiguous float32."""
    for tensor in tensors:
        assert tensor.dtype == torch.float32, f"expected float32, got {tensor.dtype}"
        assert tensor.is_contiguous(), "expected a contiguous tensor"


@register("empty_matrix", "cpu")
def empty_matrix(form: MatrixForm, device: torch.device) -> PackedWeight:
    """Panels of 16 rows. Floats [ceil(N / 16), K, 16] in their storage type; scales and integers as kernels/integer.h
    lays them out; for products with rows as they are floats, since expanding integers for every product would take
    longer than the product."""
    num_panels, quantized = -(-form.num_rows // PANEL_ROWS), None
    if isinstance(form.stored, torch.dtype) or not (form.row_bits or FORMS[form.stored].are_floats):
        dtype = form.stored if isinstance(form.stored, torch.dtype) else FORMS[form.stored].exact_in
        assert dtype in STORAGE, f"cannot pack {dtype}"
        data = torch.empty(num_panels, form.num_columns, PANEL_ROWS, dtype=dtype, device=device)
    else:
        quantized = form.stored
        assert form.row_bits != 8 or quantized == "q8_0", f"rows of 8 bits do not meet {quantized}"
        number = QUANTIZED_STORAGE[quantized]
        num_bytes = library().quantized_bytes(number, form.num_rows, form.num_columns)
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return PackedWeight(
        data=data,
        num_rows=form.num_rows,
        num_columns=form.num_columns,
        quantized=quantized,
        row_bits=0 if quantized is None or FORMS[quantized].are_floats else form.row_bits,
    )


@register("fill_rows", "cpu")
def fill_rows(packed: PackedWeight, start: int, rows: Tensor | QuantizedMatrix) -> None:
    """Whole panels, the last one zero padded."""
    count = len(rows) if isinstance(rows, Tensor) else rows.num_rows
    assert start % PANEL_ROWS == 0, f"row {start} does not begin a panel"
    assert count % PANEL_ROWS == 0 or start + count == packed.num_rows, f"{count} rows are not whole panels"
    panels = packed.data.view(-(-packed.num_rows // PANEL_ROWS), -1)[start // PANEL_ROWS :]
    if packed.quantized is not None:
        assert isinstance(rows, QuantizedMatrix) and rows.format == packed.quantized, "rows of another form"
        source, number = rows.data_NR.contiguous(), QUANTIZED_STORAGE[packed.quantized]
        library().pack_quantized(source.data_ptr(), panels.data_ptr(), number, count, packed.num_columns)
        return
    source = rows if isinstance(rows, Tensor) else dequantize(rows).to(FORMS[rows.format].exact_in)
    source = source.contiguous()
    assert source.dtype == packed.data.dtype, "rows of another form"
    library().pack(source.data_ptr(), panels.data_ptr(), source.element_size(), count, packed.num_columns)


def storage(weight: PackedWeight) -> int:
    """How the kernels number what the matrix is stored in."""
    return STORAGE[weight.data.dtype] if weight.quantized is None else QUANTIZED_STORAGE[weight.quantized]


@register("linear", "cpu")
def linear(x_TK: Tensor, weight: PackedWeight, bias_N: Tensor | None) -> Tensor:
    """[T, N] = x @ weight.T + bias."""
    assert_plain(x_TK)
    num_tokens, num_columns = x_TK.shape
    assert num_columns == weight.num_columns, f"x has {num_columns} columns, the weight {weight.num_columns}"
    bias = 0
    if bias_N is not None:
        assert_plain(bias_N)
        assert bias_N.numel() == weight.num_rows, (
            f"bias has {bias_N.numel()} numbers, the weight {weight.num_rows} rows"
        )
        bias = bias_N.data_ptr()
    out_TN = torch.empty(num_tokens, weight.num_rows)
    library().linear(
        x_TK.data_ptr(),
        weight.data.data_ptr(),
        storage(weight),
        bias,
        out_TN.data_ptr(),
        num_tokens,
        weight.num_rows,
        num_columns,
        weight.row_bits,
    )
    return out_TN


@register("embedding", "cpu")
def embedding(ids_T: Tensor, table: PackedWeight) -> Tensor:
    """[T, K] float32 rows of the packed table."""
    assert ids_T.dtype == torch.int32 and ids_T.is_contiguous(), "ids must be contiguous int32"
    out_TK = torch.empty(ids_T.shape[0], table.num_columns)
    failed = library().embedding(
        ids_T.data_ptr(),
        table.data.data_ptr(),
        storage(table),
        ids_T.shape[0],
        table.num_rows,
        table.num_columns,
        out_TK.data_ptr(),
    )
    assert not failed, f"a token id is outside 0 .. {table.num_rows - 1}"
    return out_TK


@register("rms_norm", "cpu")
def rms_norm(x_TK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of each row."""
    return _norm(x_TK, weight_K, eps, centered=False)


@register("layer_norm", "cpu")
def layer_norm(x_TK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """rms_norm of each row less its mean."""
    return _norm(x_TK, weight_K, eps, centered=True)


def _norm(x_TK: Tensor, weight_K: Tensor, eps: float, *, centered: bool) -> Tensor:
    assert_plain(x_TK, weight_K)
    num_columns = weight_K.numel()
    assert x_TK.shape[-1] == num_columns, f"x has {x_TK.shape[-1]} columns, the weight {num_columns}"
    out_TK = torch.empty_like(x_TK)
    num_rows = x_TK.numel() // num_columns
    library().norm(x_TK.data_ptr(), weight_K.data_ptr(), eps, centered, num_rows, num_columns, out_TK.data_ptr())
    return out_TK


@register("silu_mul", "cpu")
def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """[T, F] = silu(first half) * second half."""
    return _gated(library().silu_mul, gate_up_T2F)


@register("gelu_tanh_mul", "cpu")
def gelu_tanh_mul(gate_up_T2F: Tensor) -> Tensor:
    """[T, F] = gelu(first half) * second half, gelu with tanh."""
    return _gated(library().gelu_tanh_mul, gate_up_T2F)


def _gated(function: Callable[..., None], gate_up_T2F: Tensor) -> Tensor:
    assert_plain(gate_up_T2F)
    num_tokens, width = gate_up_T2F.shape
    assert width % 2 == 0, f"{width} columns are not two halves"
    out_TF = torch.empty(num_tokens, width // 2)
    function(gate_up_T2F.data_ptr(), num_tokens, width // 2, out_TF.data_ptr())
    return out_TF


@register("activate", "cpu")
def activate(x: Tensor, activation: Activation) -> Tensor:
    """The function of every number."""
    assert_plain(x)
    out = torch.empty_like(x)
    library().activate(x.data_ptr(), ACTIVATIONS[activation], x.numel(), out.data_ptr())
    return out
