"""Operations on NVIDIA GPUs, made of what torch has: its flash attention over a paged cache, its matrix products, its
fused norm. Registered for 'cuda'; the other operations are the reference's, which run on any device. Engine and worker
processes.

Not yet run on a card. They work on tensors of any device, so tests on CPU compare them with the reference, with a
stand-in for flash attention, which has kernels for CUDA alone.

Nothing here asks the device for a number, unless attention falls back to the reference: so a step can be captured in a
graph. Products are torch's, and their sums may depend on the number of rows: batch invariance is not promised.

Legend: see `reference`; S sequences, P entries of a block table.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.kv_store import KVLayer
from model_runtime.ops.matrices import empty_matrix as empty_matrix_reference
from model_runtime.ops.matrices import expanded
from model_runtime.ops.matrices import linear as linear_reference
from model_runtime.ops.reference import paged_attention as paged_attention_reference
from model_runtime.ops.reference import split_heads
from model_runtime.ops.registry import HeadShape, MatrixForm, PackedWeight, Scoring, register

PAGE = 256
"""Flash attention 2, which torch brings, wants blocks of a multiple of so many tokens."""
LARGEST_HEAD = 256


@cache
def flash_attention() -> Callable[..., object]:
    """`torch.nn.attention.varlen.varlen_attn`; importing it takes seconds, which only a GPU's user should wait."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def suits_flash_attention(dtype: torch.dtype, kv: KVLayer) -> bool:
    """Whether flash attention takes queries of a type over a cache, wherever no image attends in both directions."""
    _, _, head_dim, block_size = kv.key_NHDB.shape
    is_half = dtype in (torch.float16, torch.bfloat16) and kv.key_NHDB.dtype == dtype
    return is_half and head_dim % 8 == 0 and head_dim <= LARGEST_HEAD and block_size % PAGE == 0


def is_plain(scoring: Scoring) -> bool:
    """Whether flash attention weighs keys so."""
    return not scoring.softcap and not scoring.chunk and scoring.sinks_H is None


@register("empty_matrix", "cuda")
def empty_matrix(form: MatrixForm, device: torch.device) -> PackedWeight:
    """The matrix as it is. Rows are quantised only to 8 bits, where that is asked for: without a kernel for integers it
    costs time and saves none."""
    return empty_matrix_reference(form if form.row_bits == 8 else replace(form, row_bits=0), device)


@register("linear", "cuda")
def linear(x_TK: Tensor, weight: PackedWeight, bias_N: Tensor | None) -> Tensor:
    """[T, N] = x @ weight.T + bias in the type of x, to which a weight of another type is expanded each time; with
    quantised rows by the reference, in float32."""
    if weight.row_bits:
        return linear_reference(x_TK, weight, bias_N)
    bias = None if bias_N is None else bias_N.to(x_TK.dtype)
    return torch.nn.functional.linear(x_TK, expanded(weight, weight.data).to(x_TK.dtype), bias)


@register("rms_norm", "cuda")
def rms_norm(x_TK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of each row, computed in float32."""
    return torch.nn.functional.rms_norm(x_TK.float(), weight_K.shape, weight_K, eps).to(x_TK.dtype)


@register("paged_attention", "cuda")
def paged_attention(qkv_TE: Tensor, kv: KVLayer, batch: Batch, shape: HeadShape, scoring: Scoring) -> Tensor:
    """[T, H D]: softmax attention through the block table; by the reference where flash attention cannot."""
    by_reference = batch.visible_ends_T is not None or not is_plain(scoring) or any(shape.absent_heads)
    if by_reference or not suits_flash_attention(qkv_TE.dtype, kv):
        return paged_attention_reference(qkv_TE, kv, batch, shape, scoring)
    assert batch.key_starts_S1 is not None, "the batch is not one for a GPU"
    query_THD, _, _ = split_heads(qkv_TE, shape)
    tables_SP = batch.block_tables.view(batch.num_sequences, -1)
    out_THD = flash_attention()(
        query_THD,
        kv.key_NBHD,
        kv.value_NBHD,
        batch.query_starts_S1,
        batch.key_starts_S1,
        batch.max_query_len,
        tables_SP.shape[1] * batch.block_size,
        scale=scoring.scale,
        window_size=_window(scoring.window, batch.max_query_len),
        enable_gqa=shape.num_heads != shape.num_kv_heads,
        seqused_k=batch.kv_lens_S,
        block_table=tables_SP,
        # with more than one, torch 2.13 leaves rows of a paged cache unwritten: pytorch issue 194167
        num_splits=1,
    )
    assert isinstance(out_THD, Tensor), "more than the result was asked for"
    return out_THD.flatten(1)


def _window(window: int, max_query_len: int) -> tuple[int, int]:
    """Keys to the left and to the right of its own that a query sees; -1 is all. One query stands at the last key, so
    nothing is to its right: told so, flash attention reads the keys once for all query heads of a group."""
    if window > 0:
        return window - 1, 0
    return -1, -1 if max_query_len == 1 else 0
