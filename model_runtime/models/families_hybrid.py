"""Families of text models in which most layers go through a text with a state in place of attention: rows of the same
table as `families.py`, with what their files call things. Does not import torch."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType

from model_runtime.architecture import GATE_BOUND, UP_BOUND, ModelConfig
from model_runtime.hf_delta import with_gated_delta_net, with_kimi_delta
from model_runtime.hf_kimi_k3 import with_kimi_k3
from model_runtime.models.families_experts import MIXTRAL_NAMES
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
    spelling=qwen_spelling,
    finish=with_gated_delta_net,
    sizes=sizes(248320, 4096, 12288, 32, 16, 32768),
    defaults={**QWEN_LINEAR, "head_dim": 256, "num_key_value_heads": 4},
)

KIMI_LINEAR = Family(
    is_latent=True,
    experts=ExpertKeys(
        router="sigmoid",
        choice_bias=True,
        counts=("n_routed_experts",),
        groups="two_best",
        scale="routed_scaling_factor",
        shared="by_count",
        dense="first",
    ),
    config_names={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    renamed=MIXTRAL_NAMES,
    finish=with_kimi_delta,
    refused={"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"}
    | {"mla_use_output_gate": False},
    sizes=sizes(163840, 2304, 9216, 27, 32, 1048576)
    | {
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 32,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 2.446,
        "v_head_dim": 128,
    },
    defaults={
        "eos_token_id": 163586,
        "first_k_dense_replace": 1,
        "linear_attn_config": None,
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "mlp_layer_types": None,
        "n_group": 1,
        "norm_topk_prob": True,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        "rope_interleave": False,
        "topk_group": 1,
    },
)


def kimi_k3_spelling(key: str, rows: int, config: ModelConfig) -> Mapping[str, slice]:
    """As in `Family.spelling`. Rates of decay stand before zeros, up to a number of heads that divides well."""
    plain = ".".join(MIXTRAL_NAMES.get(part, part) for part in key.split("."))
    if not key.endswith(".A_log") or config.delta is None or rows <= config.delta.value_heads:
        return {plain: slice(0, rows)}
    return {plain: slice(0, config.delta.value_heads), "": slice(config.delta.value_heads, rows)}


KIMI_K3 = replace(
    KIMI_LINEAR,
    hidden_act="situ",
    spelling=kimi_k3_spelling,
    finish=with_kimi_k3,
    refused={"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"}
    | {"activation_situ_beta": GATE_BOUND, "activation_situ_linear_beta": UP_BOUND},
    sizes=sizes(163840, 7168, 33792, 93, 96, 1048576)
    | {
        "attn_res_block_size": 12,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 896,
        "n_shared_experts": 2,
        "num_experts_per_tok": 16,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_expert_hidden_size": 3584,
        "routed_scaling_factor": 1.0,
        "v_head_dim": 128,
    },
    defaults={**KIMI_LINEAR.defaults, "latent_moe_use_norm": True, "mla_use_output_gate": True},
)

HYBRIDS: Mapping[str, Family] = {
    "kimi_k3_text": KIMI_K3,
    "kimi_linear": KIMI_LINEAR,
    "qwen3_5_moe_text": replace(
        QWEN3_5,
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
        finish=with_gated_delta_net,
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
