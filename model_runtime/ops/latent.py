"""The meaning of the operations of latent attention, in plain torch: as `reference.py`, of which this is a part.

Legend: see `registry`; Q queries and M keys of a sequence.
"""

import torch
from torch import Tensor

from model_runtime.batch import Batch, KeyRanges
from model_runtime.latent_store import LatentLayer
from model_runtime.ops.matrices import expanded, wide_type
from model_runtime.ops.reference import attend, hidden_keys, rotate, state_of_keys
from model_runtime.ops.registry import PackedWeight, RopeTable, Scoring, register


@register("linear_heads", "any")
def linear_heads(x_THK: Tensor, weight: PackedWeight, out_THN: Tensor) -> None:
    """out = x @ weight.T of each head with its own rows."""
    assert weight.quantized is None, "matrices by head are kept as floats"
    wide = wide_type(x_THK.dtype)
    weight_HNK = expanded(weight, weight.data).to(wide).view(*out_THN.shape[1:], -1)
    out_THN.copy_(torch.einsum("thk,hnk->thn", x_THK.to(wide), weight_HNK))


@register("rope_and_cache_latent", "any")
def rope_and_cache_latent(query_THX: Tensor, row_TX: Tensor, rope: RopeTable, batch: Batch, kv: LatentLayer) -> None:
    """Rotate the last channels in place, write rows to the slots."""
    wide = wide_type(query_THX.dtype)
    cos_T1R2, sin_T1R2 = (table_PR2[batch.rope_rows_T][:, None].to(wide) for table_PR2 in (rope.cos_PR2, rope.sin_PR2))
    start = row_TX.shape[1] - 2 * cos_T1R2.shape[2]
    for heads in (query_THX, row_TX[:, None]):
        rotate(heads[..., start:], cos_T1R2, sin_T1R2, rope.interleaved)
    kv.write(batch.slots_T, row_TX)


@register("latent_attention", "any")
def latent_attention(query_THX: Tensor, kv: LatentLayer, batch: Batch, scale: float) -> Tensor:
    """[T, H, L]: softmax(q r^T scale) r[:L] over the rows r of its own sequence that a query sees."""
    assert batch.visible_ends_T is None, "latent attention is causal"
    starts, tables = batch.query_starts_S1.tolist(), batch.table_starts_S1.tolist()
    scoring = Scoring(scale=scale)
    out_THL = query_THX.new_empty(*query_THX.shape[:2], kv.latent_rank)
    for s, kv_len in enumerate(batch.kv_lens_S.tolist()):
        rows = slice(starts[s], starts[s + 1])
        row_MX = kv.gather(batch.block_tables[tables[s] : tables[s + 1]], kv_len)
        key_1XM, value_1ML = row_MX.T[None], row_MX[None, :, : kv.latent_rank]
        hidden_QM = hidden_keys(batch, rows, kv_len, scoring)
        out_THL[rows] = attend(query_THX[rows], key_1XM, value_1ML, hidden_QM, scoring, None)
    return out_THL


@register("partial_latent_attention", "any")
def partial_latent_attention(query_THX: Tensor, kv: LatentLayer, ranges: KeyRanges, scale: float) -> Tensor:
    """States [T, H, L + 2], in the type that attention is computed in."""
    starts, tables = ranges.query_starts_S1.tolist(), ranges.table_starts_S.tolist()
    states_THX = query_THX.new_zeros((*query_THX.shape[:2], kv.latent_rank + 2), dtype=wide_type(query_THX.dtype))
    for s, kv_len in enumerate(ranges.kv_lens_S.tolist()):
        rows = slice(starts[s], starts[s + 1])
        row_MX = kv.gather(ranges.block_tables[tables[s] : tables[s] - (-kv_len // kv.block_size)], kv_len)
        hidden_QM = torch.arange(kv_len, device=query_THX.device) >= ranges.ends_T[rows, None]
        if kv_len and len(hidden_QM):
            key_1XM, value_1ML = row_MX.T[None], row_MX[None, :, : kv.latent_rank]
            states_THX[rows] = state_of_keys(query_THX[rows], key_1XM, value_1ML, hidden_QM, Scoring(scale=scale))
    return states_THX
