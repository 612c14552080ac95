"""The meaning of every operation, in plain torch. Owns nothing; called by models where no faster one is registered,
and by tests and `firstlight align` as the standard to compare with. Engine and worker processes.

Works on any device and any float type, float64 included. Storage types are expanded, and float16/bfloat16 activations
computed, in float32 at least.

Legend: T tokens, K input features, N output features, H query heads, G key/value heads, D channels of a head,
E = (H + 2 G) D, F intermediate features, R rotated channels, B tokens in a block, Q queries and L keys of a sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from model_runtime.batch import Batch, KeyRanges
from model_runtime.kv_store import KVLayer, quantise
from model_runtime.ops.matrices import wide_type
from model_runtime.ops.registry import (
    Activation,
    DenseLayer,
    HeadShape,
    LayerStack,
    RopeTable,
    Scoring,
    register,
)
from model_runtime.parallel import Collectives


@register("rms_norm", "any")
def rms_norm(x_TK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467)."""
    wide_x = x_TK.to(wide_type(x_TK.dtype))
    normed = wide_x * torch.rsqrt(wide_x.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight_K).to(x_TK.dtype)


@register("layer_norm", "any")
def layer_norm(x_TK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """rms_norm of what differs from the mean (arXiv 1607.06450)."""
    wide_x = x_TK.to(wide_type(x_TK.dtype))
    return rms_norm(wide_x - wide_x.mean(dim=-1, keepdim=True), weight_K, eps).to(x_TK.dtype)


@register("qk_norm", "any")
def qk_norm(qkv_TE: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, shape: HeadShape) -> None:
    """rms_norm of every query and key head, or of all query heads and all key heads together, in place."""
    query_THD, key_TGD, _ = split_heads(qkv_TE, shape)
    for heads, weight in ((query_THD, q_weight), (key_TGD, k_weight)):
        rows = heads if weight.numel() == shape.head_dim else heads.flatten(1)
        heads.copy_(rms_norm(rows, weight, eps).view(heads.shape))


@register("rope_and_cache", "any")
def rope_and_cache(qkv_TE: Tensor, rope: RopeTable, batch: Batch, kv: KVLayer, shape: HeadShape) -> None:
    """Rotate the first R channels of queries and keys in place (RoFormer, arXiv 2104.09864), multiply queries by what
    they grow with, then write keys and values to the batch's slots, converted to the type of the cache."""
    query_THD, key_TGD, value_TGD = split_heads(qkv_TE, shape)
    cos_T1R2 = rope.cos_PR2[batch.rope_rows_T][:, None].to(wide_type(qkv_TE.dtype))
    sin_T1R2 = rope.sin_PR2[batch.rope_rows_T][:, None].to(wide_type(qkv_TE.dtype))
    for heads in (query_THD, key_TGD):
        rotate(heads, cos_T1R2, sin_T1R2, rope.interleaved)
    if rope.growth_P is not None:
        query_THD *= rope.growth_P[batch.rope_rows_T, None, None]
    block_T, offset_T = batch.slots_T // batch.block_size, batch.slots_T % batch.block_size
    if kv.scales_NH2B is not None:
        key_TGD, kv.scales_NH2B[block_T, :, 0, offset_T] = quantise(key_TGD)
        value_TGD, kv.scales_NH2B[block_T, :, 1, offset_T] = quantise(value_TGD)
    kv.key_NHDB[block_T, :, :, offset_T] = key_TGD.to(kv.key_NHDB.dtype)
    kv.value_NHBD[block_T, :, offset_T] = value_TGD.to(kv.value_NHBD.dtype)


@register("paged_attention", "any")
def paged_attention(qkv_TE: Tensor, kv: KVLayer, batch: Batch, shape: HeadShape, scoring: Scoring) -> Tensor:
    """[T, H D]: softmax(q k^T scale) v of each query over the keys of its own sequence that it sees."""
    query_THD, _, _ = split_heads(qkv_TE, shape)
    before, after = shape.absent_heads
    query_THD = torch.nn.functional.pad(query_THD, (0, 0, before, after))  # whole groups
    sinks_H = None if scoring.sinks_H is None else torch.nn.functional.pad(scoring.sinks_H, (before, after))
    starts, tables = batch.query_starts_S1.tolist(), batch.table_starts_S1.tolist()
    out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
    for s, kv_len in enumerate(batch.kv_lens_S.tolist()):
        rows = slice(starts[s], starts[s + 1])
        blocks = batch.block_tables[tables[s] : tables[s + 1]]
        key_GDL, value_GLD = _gather(kv, blocks, kv_len)
        hidden_QL = hidden_keys(batch, rows, kv_len, scoring)
        out_THD[rows] = attend(query_THD[rows], key_GDL, value_GLD, hidden_QL, scoring, sinks_H)
    return out_THD[:, before : before + shape.num_heads].flatten(1)


@register("partial_attention", "any")
def partial_attention(query_TC: Tensor, kv: KVLayer, ranges: KeyRanges, shape: HeadShape, scoring: Scoring) -> Tensor:
    """States [T, H, D + 2], in the type that attention is computed in."""
    before, after = shape.absent_heads
    query_THD = query_TC.view(-1, shape.num_heads, shape.head_dim)
    query_THD = torch.nn.functional.pad(query_THD, (0, 0, before, after))  # whole groups
    block_size = kv.key_NHDB.shape[3]
    starts, tables = ranges.query_starts_S1.tolist(), ranges.table_starts_S.tolist()
    states_THX = query_THD.new_zeros((*query_THD.shape[:2], shape.head_dim + 2), dtype=wide_type(query_TC.dtype))
    for s, kv_len in enumerate(ranges.kv_lens_S.tolist()):
        rows = slice(starts[s], starts[s + 1])
        blocks = ranges.block_tables[tables[s] : tables[s] - (-kv_len // block_size)]
        key_GDL, value_GLD = _gather(kv, blocks, kv_len)
        key_L = torch.arange(kv_len, device=query_TC.device)
        hidden_QL = (key_L < ranges.begins_T[rows, None]) | (key_L >= ranges.ends_T[rows, None])
        if kv_len and len(hidden_QL):
            states_THX[rows] = state_of_keys(query_THD[rows], key_GDL, value_GLD, hidden_QL, scoring)
    return states_THX[:, before : before + shape.num_heads].contiguous()


@register("merge_attention", "any")
def merge_attention(states_NTHX: Tensor) -> Tensor:
    """[T, H D]: two parts become one by scaling what either summed to the larger of their largest scores."""
    mixed_THD = torch.zeros_like(states_NTHX[0, ..., :-2])
    largest_TH1, sum_TH1 = torch.full_like(mixed_THD[..., :1], -torch.inf), torch.zeros_like(mixed_THD[..., :1])
    for part_THX in states_NTHX:
        score_TH1, part_sum_TH1 = part_THX[..., -2:-1], part_THX[..., -1:]
        is_empty_TH1 = part_sum_TH1 == 0
        new_TH1 = torch.where(is_empty_TH1, largest_TH1, largest_TH1.maximum(score_TH1))
        keep_TH1 = torch.where(is_empty_TH1, 1.0, (largest_TH1 - new_TH1).exp())
        add_TH1 = torch.where(is_empty_TH1, 0.0, (score_TH1 - new_TH1).exp())
        mixed_THD = mixed_THD * keep_TH1 + part_THX[..., :-2] * add_TH1
        sum_TH1, largest_TH1 = sum_TH1 * keep_TH1 + part_sum_TH1 * add_TH1, new_TH1
    return (mixed_THD / sum_TH1).flatten(1)


@register("silu_mul", "any")
def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """[T, F] = silu(gate) * up, silu(x) = x / (1 + exp(-x))."""
    gate_TF, up_TF = gate_up_T2F.to(wide_type(gate_up_T2F.dtype)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate_TF) * up_TF).to(gate_up_T2F.dtype)


@register("gelu_tanh_mul", "any")
def gelu_tanh_mul(gate_up_T2F: Tensor) -> Tensor:
    """[T, F] = gelu(gate) * up, gelu(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    gate_TF, up_TF = gate_up_T2F.to(wide_type(gate_up_T2F.dtype)).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate_TF, approximate="tanh") * up_TF).to(gate_up_T2F.dtype)


PLAIN: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": torch.nn.functional.silu,
        "tanh": torch.tanh,
        "exp": torch.exp,
        "sigmoid": torch.sigmoid,
        "softplus": torch.nn.functional.softplus,
    }
)


@register("activate", "any")
def activate(x: Tensor, activation: Activation) -> Tensor:
    """gelu(x) is x times the normal distribution's function of x, or that with tanh."""
    wide = x.to(wide_type(x.dtype))
    if activation in PLAIN:
        return PLAIN[activation](wide).to(x.dtype)
    if activation == "quick_gelu":
        return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(wide, approximate=approximate).to(x.dtype)


@register("layer_program", "any")
def layer_program(layers: Sequence[DenseLayer], collectives: Collectives, sharers: Collectives) -> LayerStack | None:
    """None: layers run one operation after the other."""
    return None


def split_heads(qkv_TE: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """Views [T, H, D], [T, G, D], [T, G, D] of queries, keys and values."""
    first_value = shape.num_heads + shape.num_kv_heads
    heads = qkv_TE.view(-1, first_value + shape.num_kv_heads, shape.head_dim)
    return heads[:, : shape.num_heads], heads[:, shape.num_heads : first_value], heads[:, first_value:]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotate channel pairs (2i, 2i + 1) or (i, i + R / 2) of [T, heads, D] in place by the angles of [T, 1, R / 2]."""
    half = cos.shape[-1]
    if interleaved:
        first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    else:
        first, second = heads[..., :half], heads[..., half : 2 * half]
    rotated = first * cos - second * sin, second * cos + first * sin
    first.copy_(rotated[0])
    second.copy_(rotated[1])


def _gather(kv: KVLayer, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """Keys [G, D, L] and values [G, L, D] of a sequence, int8 expanded."""
    key_NHDB, value_NHBD = kv.key_NHDB[blocks], kv.value_NHBD[blocks]
    if kv.scales_NH2B is not None:
        scales_NH2B = kv.scales_NH2B[blocks]
        key_NHDB, value_NHBD = key_NHDB * scales_NH2B[:, :, :1], value_NHBD * scales_NH2B[:, :, 1, :, None]
    key_GDL = key_NHDB.permute(1, 2, 0, 3).flatten(2)[:, :, :kv_len]
    return key_GDL, value_NHBD.transpose(0, 1).flatten(1, 2)[:, :kv_len]


def hidden_keys(batch: Batch, rows: slice, num_keys: int, scoring: Scoring) -> Tensor:
    """[Q, L] bool: true where a query does not see a key."""
    position_Q = batch.positions_T[rows]
    begin_Q, end_Q = scoring.begins(position_Q), position_Q + 1
    if batch.visible_ends_T is not None:
        end_Q = batch.visible_ends_T[rows]
    key_L = torch.arange(num_keys, device=position_Q.device)
    return (key_L < begin_Q[:, None]) | (key_L >= end_Q[:, None])


def _scores(query_QHD: Tensor, key_GDL: Tensor, hidden_QL: Tensor, scoring: Scoring) -> Tensor:
    """[H, Q, L]: -inf where a query does not see a key. Heads of a group share a key/value head."""
    wide = wide_type(query_QHD.dtype)
    num_queries, num_heads, head_dim = query_QHD.shape
    query_GxD = query_QHD.transpose(0, 1).reshape(len(key_GDL), -1, head_dim).to(wide)
    scores_HQL = (query_GxD @ key_GDL.to(wide) * scoring.scale).view(num_heads, num_queries, -1)
    if scoring.softcap:
        scores_HQL = (scores_HQL / scoring.softcap).tanh() * scoring.softcap
    return scores_HQL.masked_fill(hidden_QL, float("-inf"))


def _mixed(weights_HQL: Tensor, value_GLD: Tensor) -> Tensor:
    """[H, Q, D]"""
    num_heads, num_queries, num_keys = weights_HQL.shape
    mixed_GxD = weights_HQL.view(len(value_GLD), -1, num_keys) @ value_GLD.to(weights_HQL.dtype)
    return mixed_GxD.view(num_heads, num_queries, -1)


def state_of_keys(query_QHD: Tensor, key_GDL: Tensor, value_GLD: Tensor, hidden_QL: Tensor, scoring: Scoring) -> Tensor:
    """[Q, H, D + 2]: see `partial_attention`."""
    scores_HQL = _scores(query_QHD, key_GDL, hidden_QL, scoring)
    largest_HQ1 = scores_HQL.amax(dim=-1, keepdim=True)
    weights_HQL = (scores_HQL - largest_HQ1).exp().masked_fill(hidden_QL, 0.0)
    parts = _mixed(weights_HQL, value_GLD), largest_HQ1, weights_HQL.sum(dim=-1, keepdim=True)
    return torch.cat(parts, dim=-1).transpose(0, 1)


def attend(
    query_QHD: Tensor,
    key_GDL: Tensor,
    value_GLD: Tensor,
    hidden_QL: Tensor,
    scoring: Scoring,
    sinks_H: Tensor | None,
) -> Tensor:
    """[Q, H, D]: masked attention of one sequence, dense."""
    scores_HQL, num_keys = _scores(query_QHD, key_GDL, hidden_QL, scoring), key_GDL.shape[2]
    if sinks_H is not None:
        sinks_HQ1 = sinks_H.to(scores_HQL.dtype)[:, None, None].expand(-1, len(query_QHD), 1)
        scores_HQL = torch.cat((scores_HQL, sinks_HQ1), dim=-1)
    weights_HQL = scores_HQL.softmax(dim=-1)[..., :num_keys].contiguous()
    return _mixed(weights_HQL, value_GLD).transpose(0, 1).to(query_QHD.dtype)
