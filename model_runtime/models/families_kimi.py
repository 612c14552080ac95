"""Kimi Linear and the language model of Kimi K3: rows as those of `families_hybrid.py`. Does not import torch."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from model_runtime.architecture import GATE_BOUND, UP_BOUND, ModelConfig
from model_runtime.hf.delta import with_kimi_delta
from model_runtime.hf.kimi_k3 import with_kimi_k3
from model_runtime.models.families_experts import MIXTRAL_NAMES
from model_runtime.models.families_latent import DEEPSEEK_EXPERTS, LATENT_SIZES
from model_runtime.models.family import Family, sizes

KIMI_REFUSED: Mapping[str, object] = MappingProxyType(
    {"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"}
)

KIMI_LINEAR = Family(
    is_latent=True,
    experts=replace(DEEPSEEK_EXPERTS, dense="by_type_or_first"),
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
    refused={**KIMI_REFUSED, "mla_use_output_gate": False},
    sizes=sizes(163840, 2304, 9216, 27, 32, 1048576)
    | LATENT_SIZES
    | {
        "moe_intermediate_size": 1024,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 32,
        "routed_scaling_factor": 2.446,
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
    refused={**KIMI_REFUSED, "activation_situ_beta": GATE_BOUND, "activation_situ_linear_beta": UP_BOUND},
    sizes=sizes(163840, 7168, 33792, 93, 96, 1048576)
    | LATENT_SIZES
    | {
        "attn_res_block_size": 12,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 896,
        "n_shared_experts": 2,
        "num_experts_per_tok": 16,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "routed_expert_hidden_size": 3584,
        "routed_scaling_factor": 1.0,
    },
    defaults={**KIMI_LINEAR.defaults, "latent_moe_use_norm": True, "mla_use_output_gate": True},
)

KIMI: Mapping[str, Family] = {"kimi_k3_text": KIMI_K3, "kimi_linear": KIMI_LINEAR}
