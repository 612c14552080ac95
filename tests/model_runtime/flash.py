"""A stand-in for flash attention on CPU, where torch has no kernel for it, and a GPU's layout of the cache."""

import torch
from torch import Tensor

from model_runtime.kv_store import KVLayer

GPU = torch.cuda.is_available()


def token_major(layer: KVLayer, dtype: torch.dtype) -> KVLayer:
    """A copy that lies in memory as on a GPU."""
    key_NBHD, value_NBHD = (part.to(dtype).contiguous() for part in (layer.key_NBHD, layer.value_NBHD))
    return KVLayer(key_NBHD.permute(0, 2, 3, 1), value_NBHD.transpose(1, 2))


def stand_in(
    query_THD: Tensor,
    key_NBGD: Tensor,
    value_NBGD: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` with a block table, in float32, and what its CUDA kernel refuses (FA2's
    mha_varlen_fwd): masks are aligned at the end, so that the last query sees the last key."""
    dtype, (_, num_heads, head_dim), (_, page, num_groups, _) = query_THD.dtype, query_THD.shape, key_NBGD.shape
    assert dtype in (torch.float16, torch.bfloat16) and key_NBGD.dtype == value_NBGD.dtype == dtype
    assert page % 256 == 0 and head_dim % 8 == 0 and head_dim <= 256 and num_splits == 1
    assert query_THD.stride(-1) == key_NBGD.stride(-1) == value_NBGD.stride(-1) == block_table.stride(-1) == 1
    for array in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert array.dtype == torch.int32 and array.is_contiguous()
    assert enable_gqa == (num_heads != num_groups) and (window_size[1] == 0 or max_q == 1)
    assert cu_seq_k.diff().equal(seqused_k) and cu_seq_q[-1] == len(query_THD)
    assert max_q == cu_seq_q.diff().max() and max_k >= seqused_k.max() and len(block_table) == len(seqused_k)
    out_THD = torch.full_like(query_THD, float("nan"), memory_format=torch.contiguous_format)
    for s, num_keys in enumerate(seqused_k.tolist()):
        rows = slice(int(cu_seq_q[s]), int(cu_seq_q[s + 1]))
        blocks = block_table[s, : -(-num_keys // page)].long()
        query_HQD = query_THD[rows].transpose(0, 1).float()
        key_HLD, value_HLD = (
            cache[blocks].flatten(0, 1)[:num_keys].transpose(0, 1).float().repeat_interleave(num_heads // num_groups, 0)
            for cache in (key_NBGD, value_NBGD)
        )
        behind_QL = torch.arange(num_keys)[-query_HQD.shape[1] :, None] - torch.arange(num_keys)
        before, after = (num_keys if side < 0 else side for side in window_size)
        hidden_QL = (behind_QL < -after) | (behind_QL > before)
        scores_HQL = (query_HQD @ key_HLD.transpose(1, 2) * scale).masked_fill(hidden_QL, float("-inf"))
        out_THD[rows] = (scores_HQL.softmax(dim=-1) @ value_HLD).transpose(0, 1).to(dtype)
    return out_THD
