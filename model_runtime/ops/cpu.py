"""Operations on CPU in compiled code: float32 activations, weights in float32, bfloat16 or float16, KV cache in
float32, bfloat16, float16 or int8. Registered for 'cpu'; called by models through `Ops`. Engine and worker processes.

Every result is batch invariant: the number for a row does not depend on the other rows, on how a prompt was cut into
steps, or on the number of threads. Shapes and types are asserted; numbers from the batch that index memory are checked
in the kernels.

Legend: see `registry`.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.kernels.library import library
from model_runtime.kv_store import KVLayer
from model_runtime.ops.registry import Activation, HeadShape, PackedWeight, RopeTable, Scoring, register
from model_runtime.quantized import QuantizedFormat, QuantizedMatrix, dequantize

PANEL = 16
"""Output features of a packed panel."""
STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""How the kernels number the storage types."""
QUANTIZED_STORAGE: Mapping[QuantizedFormat, int] = {"q8_0": 3, "q4_0": 4, "q4_1": 5}
"""The same for matrices of integers."""
KV_STORAGE = {**STORAGE, torch.int8: 3}
"""The same for the KV cache."""
ACTIVATIONS: Mapping[Activation, int] = {"gelu": 0, "gelu_tanh": 1, "quick_gelu": 2, "silu": 3, "tanh": 4}
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


@register("qk_norm", "cpu")
def qk_norm(qkv_TE: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, shape: HeadShape) -> None:
    """rms_norm of every query and key head, or of all query heads and all key heads together, in place."""
    assert_plain(qkv_TE, q_weight, k_weight)
    _assert_heads(qkv_TE, shape)
    library().qk_norm(
        qkv_TE.data_ptr(),
        q_weight.data_ptr(),
        k_weight.data_ptr(),
        eps,
        norms_whole_rows(q_weight, k_weight, shape),
        qkv_TE.shape[0],
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
    )


@register("rope_and_cache", "cpu")
def rope_and_cache(qkv_TE: Tensor, rope: RopeTable, batch: Batch, kv: KVLayer, shape: HeadShape) -> None:
    """Rotate queries and keys in place, write keys and values to the batch's slots."""
    assert_plain(qkv_TE, rope.cos_PR2, rope.sin_PR2)
    _assert_heads(qkv_TE, shape)
    num_positions, half = rope.cos_PR2.shape
    assert 2 * half <= shape.head_dim, f"{2 * half} rotated channels in a head of {shape.head_dim}"
    failed = library().rope_and_cache(
        qkv_TE.data_ptr(),
        rope.cos_PR2.data_ptr(),
        rope.sin_PR2.data_ptr(),
        num_positions,
        2 * half,
        rope.interleaved,
        batch.rope_rows_T.data_ptr(),
        batch.slots_T.data_ptr(),
        *kv_arguments(kv, batch.block_size, shape),
        kv.key_NHDB.shape[0] * batch.block_size,
        qkv_TE.shape[0],
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        batch.block_size,
    )
    assert not failed, f"a position or slot is outside the {num_positions} positions of the rope table or the KV cache"


@register("paged_attention", "cpu")
def paged_attention(qkv_TE: Tensor, kv: KVLayer, batch: Batch, shape: HeadShape, scoring: Scoring) -> Tensor:
    """[T, H D]: softmax attention through the block table."""
    assert_plain(qkv_TE)
    _assert_heads(qkv_TE, shape)
    out_TC = torch.empty(qkv_TE.shape[0], shape.num_heads * shape.head_dim)
    failed = library().paged_attention(
        qkv_TE.data_ptr(),
        *kv_arguments(kv, batch.block_size, shape),
        out_TC.data_ptr(),
        batch.query_starts_S1.data_ptr(),
        batch.kv_lens_S.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.table_starts_S1.data_ptr(),
        0 if batch.visible_ends_T is None else batch.visible_ends_T.data_ptr(),
        batch.num_sequences,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.absent_heads[0],
        shape.group_size,
        batch.block_size,
        scoring.scale,
        scoring.window,
        scoring.softcap,
    )
    assert not failed, "a token is to see keys that its sequence does not have"
    return out_TC


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


def norms_whole_rows(q_weight: Tensor, k_weight: Tensor, shape: HeadShape) -> bool:
    """Whether weights of `qk_norm` are for all heads together."""
    sizes, head_dim = (q_weight.numel(), k_weight.numel()), shape.head_dim
    whole = (shape.num_heads * head_dim, shape.num_kv_heads * head_dim)
    assert sizes in ((head_dim, head_dim), whole), "norm weights must have a number per channel"
    return sizes == whole


def _assert_heads(qkv_TE: Tensor, shape: HeadShape) -> None:
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    assert qkv_TE.shape[1] == width, f"qkv has {qkv_TE.shape[1]} columns, the heads need {width}"


def kv_arguments(kv: KVLayer, block_size: int, shape: HeadShape) -> tuple[int, int, int, int]:
    """Keys, values, scales and how they are stored, for a kernel. Their layout must be that of the batch and heads."""
    heads = (kv.key_NHDB.shape[0], shape.num_kv_heads)
    expected = (*heads, shape.head_dim, block_size)
    assert kv.key_NHDB.shape == expected, f"keys are {tuple(kv.key_NHDB.shape)}, expected {expected}"
    dtype = kv.key_NHDB.dtype
    assert dtype in KV_STORAGE and kv.value_NHBD.dtype == dtype, f"no kernel for a KV cache of {dtype}"
    assert kv.key_NHDB.is_contiguous() and kv.value_NHBD.is_contiguous(), "expected a contiguous tensor"
    assert (kv.scales_NH2B is not None) == (dtype == torch.int8), "scales belong to int8"
    scales = 0
    if kv.scales_NH2B is not None:
        assert_plain(kv.scales_NH2B)
        assert kv.scales_NH2B.shape == (*heads, 2, block_size), "scales are not those of the keys and values"
        scales = kv.scales_NH2B.data_ptr()
    return kv.key_NHDB.data_ptr(), kv.value_NHBD.data_ptr(), scales, KV_STORAGE[dtype]
