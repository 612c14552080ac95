"""Operations of latent attention on CPU in compiled code: over rows in float32, bfloat16, float16 or int8. Registered
for 'cpu'; called by models through `Ops`, as those in `cpu`. Engine and worker processes.

Legend: see `registry`.
"""

import torch
from torch import Tensor

from model_runtime.batch import Batch, KeyRanges
from model_runtime.kernels.library import library
from model_runtime.latent_store import LatentLayer
from model_runtime.ops.cpu import STORAGE, assert_plain
from model_runtime.ops.cpu_attention import KV_STORAGE, NO_KEYS
from model_runtime.ops.registry import PackedWeight, RopeTable, register


@register("linear_heads", "cpu")
def linear_heads(x_THK: Tensor, weight: PackedWeight, out_THN: Tensor) -> None:
    """out = x @ weight.T of each head with its own rows."""
    num_tokens, num_heads, num_columns = x_THK.shape
    num_rows = out_THN.shape[2]
    assert weight.quantized is None, "matrices by head are kept as floats"
    assert (weight.num_rows, weight.num_columns) == (num_heads * num_rows, num_columns), "not the matrix of these heads"
    assert out_THN.shape[:2] == x_THK.shape[:2], f"x is {tuple(x_THK.shape)}, the result {tuple(out_THN.shape)}"
    for tensor in (x_THK, out_THN):
        assert tensor.dtype == torch.float32 and tensor.stride(2) == 1, "expected rows of float32"
    library().linear_heads(
        x_THK.data_ptr(),
        x_THK.stride(0),
        x_THK.stride(1),
        weight.data.data_ptr(),
        STORAGE[weight.data.dtype],
        out_THN.data_ptr(),
        out_THN.stride(0),
        out_THN.stride(1),
        num_tokens,
        num_heads,
        num_rows,
        num_columns,
    )


@register("rope_and_cache_latent", "cpu")
def rope_and_cache_latent(query_THX: Tensor, row_TX: Tensor, rope: RopeTable, batch: Batch, kv: LatentLayer) -> None:
    """Rotate the last channels in place, write rows to the slots."""
    assert_plain(query_THX, row_TX, rope.cos_PR2, rope.sin_PR2)
    num_tokens, num_heads, width = query_THX.shape
    num_positions, half = rope.cos_PR2.shape
    assert row_TX.shape == (num_tokens, width), f"rows are {tuple(row_TX.shape)}, queries {tuple(query_THX.shape)}"
    assert 2 * half <= width - kv.latent_rank, f"{2 * half} rotated channels in rows of {width}"
    failed = library().rope_and_cache_latent(
        query_THX.data_ptr(),
        row_TX.data_ptr(),
        rope.cos_PR2.data_ptr(),
        rope.sin_PR2.data_ptr(),
        num_positions,
        2 * half,
        rope.interleaved,
        batch.rope_rows_T.data_ptr(),
        batch.slots_T.data_ptr(),
        *_rows(kv, width),
        num_tokens,
        num_heads,
        width,
        kv.latent_rank,
    )
    assert not failed, f"a position or slot is outside the {num_positions} positions of the rope table or the cache"


@register("latent_attention", "cpu")
def latent_attention(query_THX: Tensor, kv: LatentLayer, batch: Batch, scale: float) -> Tensor:
    """[T, H, L]: softmax attention through the block table."""
    assert batch.visible_ends_T is None, "latent attention is causal"
    arrays = (batch.query_starts_S1, batch.kv_lens_S, batch.block_tables, batch.table_starts_S1)
    return _attention(query_THX, kv, arrays, None, scale)


@register("partial_latent_attention", "cpu")
def partial_latent_attention(query_THX: Tensor, kv: LatentLayer, ranges: KeyRanges, scale: float) -> Tensor:
    """States [T, H, L + 2]."""
    arrays = (ranges.query_starts_S1, ranges.kv_lens_S, ranges.block_tables, ranges.table_starts_S)
    return _attention(query_THX, kv, arrays, ranges.ends_T, scale)


def _attention(
    query_THX: Tensor, kv: LatentLayer, arrays: tuple[Tensor, ...], ends_T: Tensor | None, scale: float
) -> Tensor:
    """Mixed latents, or with `ends_T` states; `arrays` are the starts of queries, keys, tables and their starts."""
    assert_plain(query_THX)
    num_tokens, num_heads, width = query_THX.shape
    out_THL = torch.empty(num_tokens, num_heads, kv.latent_rank + (0 if ends_T is None else 2))
    failed = library().latent_attention(
        query_THX.data_ptr(),
        *_rows(kv, width),
        out_THL.data_ptr(),
        *(array.data_ptr() for array in arrays),
        0 if ends_T is None else ends_T.data_ptr(),
        arrays[1].shape[0],
        num_heads,
        width,
        kv.latent_rank,
        kv.block_size,
        scale,
    )
    assert not failed, NO_KEYS
    return out_THL


def _rows(kv: LatentLayer, width: int) -> tuple[int, int, int, int]:
    """Rows, scales, how they are stored and how many slots there are, for a kernel."""
    assert kv.rows_NBX.shape[2] == width, f"rows of {kv.rows_NBX.shape[2]} numbers, expected {width}"
    assert kv.dtype in KV_STORAGE and kv.rows_NBX.is_contiguous(), f"no kernel for a cache of {kv.dtype}"
    assert (kv.scales_NB2 is not None) == (kv.dtype == torch.int8), "scales belong to int8"
    scales = 0
    if kv.scales_NB2 is not None:
        assert_plain(kv.scales_NB2)
        scales = kv.scales_NB2.data_ptr()
    return kv.rows_NBX.data_ptr(), scales, KV_STORAGE[kv.dtype], kv.num_blocks * kv.block_size
