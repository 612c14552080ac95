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
from model_runtime.ops.registry import Activation, PackedWeight, register
from model_runtime.quantized import QuantizedFormat, QuantizedMatrix, dequantize

PANEL = 16
"""Output features of a packed panel."""
STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""How the kernels number the storage types."""
QUANTIZED_STORAGE: Mapping[QuantizedFormat, int] = {"q8_0": 3, "q4_0": 4, "q4_1": 5}
"""The same for matrices of integers."""
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


@register("pack", "cpu")
def pack(weight_NK: Tensor) -> PackedWeight:
    """Panels [ceil(N / 16), K, 16], zero padded, in the storage type of the weight."""
    assert weight_NK.dtype in STORAGE, f"cannot pack {weight_NK.dtype}"
    num_rows, num_columns = weight_NK.shape
    source = weight_NK.contiguous()
    data = torch.empty(-(-num_rows // PANEL), num_columns, PANEL, dtype=source.dtype)
    library().pack(source.data_ptr(), data.data_ptr(), source.element_size(), num_rows, num_columns)
    return PackedWeight(data=data, num_rows=num_rows, num_columns=num_columns)


@register("pack_quantized", "cpu")
def pack_quantized(matrix: QuantizedMatrix, integer_rows: bool) -> PackedWeight:
    """Panels of 16 rows, scales and integers as they are (kernels/integer.h); float32 for products with rows as they
    are, since expanding them for every product would take longer than the product."""
    if not integer_rows:
        return pack(dequantize(matrix))
    kernels, data_NR = library(), matrix.data_NR.contiguous()
    arguments = (QUANTIZED_STORAGE[matrix.format], matrix.num_rows, matrix.num_columns)
    data = torch.empty(kernels.quantized_bytes(*arguments), dtype=torch.uint8)
    kernels.pack_quantized(data_NR.data_ptr(), data.data_ptr(), *arguments)
    return PackedWeight(
        data=data,
        num_rows=matrix.num_rows,
        num_columns=matrix.num_columns,
        quantized=matrix.format,
        integer_rows=True,
    )


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
