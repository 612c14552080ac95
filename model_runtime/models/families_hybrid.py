"""Families of text models in which most layers go through a text with a state in place of attention: rows of the same
table as `families.py`, with what their files call things. Does not import torch."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType

from model_runtime.architecture import ModelConfig
from model_runtime.hf.delta import with_gated_delta_net
from model_runtime.models.families_kimi import KIMI
from model_runtime.models.family import ExpertKeys, Family, sizes

QWEN_NAMES = MappingProxyType(
    {
        "in_proj_qkvz": "qkvz_proj",
        "in_proj_ba": "ba_proj",
        "in_proj_z": "g_proj",
        "in_proj_b": "b_proj",
        "in_proj_a": "a_proj",
        "norm": "o_norm",
        "out_proj": "o_proj",
    }
)
"""Of the parts of a Gated DeltaNet, and what Kimi's files call them."""


def qwen_spelling(key: str, rows: int, config: ModelConfig) -> Mapping[str, slice]:
    """As in `Family.spelling`. Layers for drafts are left out."""
    if key.startswith("mtp."):
        return {}
    layer, found, name = key.partition(".linear_attn.")
    if not found:
        return {key.replace(".shared_expert.", ".shared_experts."): slice(0, rows)}
    part, _, rest = name.partition(".")
    if part not in ("in_proj_qkv", "conv1d"):
        plain = QWEN_NAMES.get(part, part)
        return {f"{layer}.self_attn.{plain}{'.' if rest else ''}{rest}": slice(0, rows)}
    rule = config.delta
    assert rule is not None, "a family whose config says nothing of its states"
    keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    numbers = rule.conv_width if part == "conv1d" else 1
    counts = [count * numbers for count in (keys, keys, values)]
    ending = "conv1d" if part == "conv1d" else "proj"
    return {
        f"{layer}.self_attn.{name}_{ending}.{rest}": slice(end - count, end)
        for name, count, end in zip("qkv", counts, accumulate(counts), strict=True)
    }


QWEN_LINEAR: Mapping[str, object] = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
}

QWEN3_5 = Family(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="head",
    partial_rotary=True,
    mrope_sections=(11, 11, 10),
    mrope_interleaved=True,
    spelling=qwen_spelling,
    finish=with_gated_delta_net,
    sizes=sizes(248320, 4096, 12288, 32, 16, 32768),
    defaults={**QWEN_LINEAR, "head_dim": 256, "num_key_value_heads": 4},
)

HYBRIDS: Mapping[str, Family] = {
    **KIMI,
    "qwen3_5_moe_text": replace(
        QWEN3_5,
        stacked_experts="halves",
        experts=ExpertKeys(router="softmax", shared="by_size", renormalise=True),
        sizes=sizes(248320, 2048, 512, 40, 16, 32768),
        defaults={
            **QWEN_LINEAR,
            "head_dim": 256,
            "moe_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 2,
            "num_local_experts": 256,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "qwen3_5_text": QWEN3_5,
    "qwen3_next": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
        partial_rotary=True,
        spelling=qwen_spelling,
        finish=partial(with_gated_delta_net, interleaved=True),
        experts=ExpertKeys(router="softmax", shared="by_size", dense="by_step"),
        sizes=sizes(151936, 2048, 5632, 48, 16, 32768),
        defaults={
            **QWEN_LINEAR,
            "decoder_sparse_step": 1,
            "head_dim": 256,
            "mlp_only_layers": None,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_experts_per_tok": 10,
            "num_key_value_heads": 2,
            "num_local_experts": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
}
