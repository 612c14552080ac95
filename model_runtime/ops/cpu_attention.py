"""Operations of attention on CPU in compiled code: over keys and values in float32, bfloat16, float16 or int8.
Registered for 'cpu'; called by models through `Ops`, as those in `cpu`. Engine and worker processes.

Legend: see `registry`.
"""

import torch
from torch import Tensor

from model_runtime.batch import Batch, KeyRanges
from model_runtime.kernels.library import library
from model_runtime.kv_store import KVLayer
from model_runtime.ops.cpu import STORAGE, assert_plain
from model_runtime.ops.registry import HeadShape, RopeTable, Scoring, register

KV_STORAGE = {**STORAGE, torch.int8: 3}
"""How the kernels number the storage types of the KV cache."""
NO_KEYS = "a token is to see keys that its sequence does not have, or blocks that are not there"
"""What a kernel of attention refuses."""


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
    """Rotate queries and keys in place, let queries grow, write keys and values to the batch's slots."""
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
        growth_pointer(rope),
        batch.rope_rows_T.data_ptr(),
        batch.slots_T.data_ptr(),
        *kv_arguments(kv, batch.block_size, shape),
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
    sinks = sinks_pointer(scoring, shape)
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
        sight(scoring),
        scoring.softcap,
        sinks,
    )
    assert not failed, NO_KEYS
    return out_TC


@register("partial_attention", "cpu")
def partial_attention(query_TC: Tensor, kv: KVLayer, ranges: KeyRanges, shape: HeadShape, scoring: Scoring) -> Tensor:
    """States [T, H, D + 2]."""
    assert_plain(query_TC)
    assert query_TC.shape[1] == shape.num_heads * shape.head_dim, f"queries are {tuple(query_TC.shape)}"
    states_THX = torch.empty(query_TC.shape[0], shape.num_heads, shape.head_dim + 2)
    block_size = kv.key_NHDB.shape[3]
    failed = library().partial_attention(
        query_TC.data_ptr(),
        *kv_arguments(kv, block_size, shape),
        states_THX.data_ptr(),
        ranges.query_starts_S1.data_ptr(),
        ranges.kv_lens_S.data_ptr(),
        ranges.block_tables.data_ptr(),
        ranges.table_starts_S.data_ptr(),
        ranges.begins_T.data_ptr(),
        ranges.ends_T.data_ptr(),
        ranges.kv_lens_S.shape[0],
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.absent_heads[0],
        shape.group_size,
        block_size,
        scoring.scale,
        scoring.softcap,
    )
    assert not failed, NO_KEYS
    return states_THX


@register("merge_attention", "cpu")
def merge_attention(states_NTHX: Tensor) -> Tensor:
    """[T, H D]: attention over all parts of the keys."""
    assert_plain(states_NTHX)
    count, num_tokens, num_heads, width = states_NTHX.shape
    out_TC = torch.empty(num_tokens, num_heads * (width - 2))
    library().merge_attention(states_NTHX.data_ptr(), count, num_tokens * num_heads, width - 2, out_TC.data_ptr())
    return out_TC


def _assert_heads(qkv_TE: Tensor, shape: HeadShape) -> None:
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    assert qkv_TE.shape[1] == width, f"qkv has {qkv_TE.shape[1]} columns, the heads need {width}"


def kv_arguments(kv: KVLayer, block_size: int, shape: HeadShape) -> tuple[int, int, int, int, int]:
    """Keys, values, scales, how they are stored and how many slots there are, for a kernel. Their layout must be that
    of the batch and heads."""
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
    return kv.key_NHDB.data_ptr(), kv.value_NHBD.data_ptr(), scales, KV_STORAGE[dtype], kv.num_blocks * block_size


def norms_whole_rows(q_weight: Tensor, k_weight: Tensor, shape: HeadShape) -> bool:
    """Whether weights of `qk_norm` are for all heads together."""
    sizes, head_dim = (q_weight.numel(), k_weight.numel()), shape.head_dim
    whole = (shape.num_heads * head_dim, shape.num_kv_heads * head_dim)
    assert sizes in ((head_dim, head_dim), whole), "norm weights must have a number per channel"
    return sizes == whole


def growth_pointer(rope: RopeTable) -> int | None:
    """Address of a number for each row of the table, if queries grow."""
    if rope.growth_P is None:
        return None
    assert_plain(rope.growth_P)
    assert len(rope.growth_P) == len(rope.cos_PR2), "queries must grow by a number for each position"
    return rope.growth_P.data_ptr()


def sight(scoring: Scoring) -> int:
    """A window, or less the length of chunks, as kernels know them."""
    assert not (scoring.window and scoring.chunk), f"{scoring} has a window in chunks"
    return scoring.window or -scoring.chunk


def sinks_pointer(scoring: Scoring, shape: HeadShape) -> int | None:
    """Address of a number for each query head, if there are any."""
    if scoring.sinks_H is None:
        return None
    assert_plain(scoring.sinks_H)
    assert scoring.sinks_H.numel() == shape.num_heads, "sinks must have a number per query head"
    return scoring.sinks_H.data_ptr()
