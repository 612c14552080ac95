"""Families of text models with latent attention: rows of the same table as `families.py`. Does not import torch."""

from collections.abc import Mapping
from types import MappingProxyType

from model_runtime.models.family import ExpertKeys, Family, sizes

DEEPSEEK_EXPERTS = ExpertKeys(
    router="sigmoid",
    choice_bias=True,
    counts=("n_routed_experts",),
    groups="two_best",
    scale="routed_scaling_factor",
    shared="by_count",
    dense="first",
)
"""Of DeepSeek-V3, as others have them, too."""

LATENT_SIZES = MappingProxyType(
    {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)
"""Of latent attention, in all of these families."""

DEEPSEEK_V3 = Family(
    is_latent=True,
    experts=DEEPSEEK_EXPERTS,
    draft_keys=("num_nextn_predict_layers",),
    refused={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    sizes=sizes(129280, 7168, 18432, 61, 128, 4096)
    | LATENT_SIZES
    | {
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    defaults={"eos_token_id": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 1, "rope_interleave": True},
)

DEEPSEEK_V2 = Family(
    is_latent=True,
    experts=ExpertKeys(
        router="softmax",
        counts=("n_routed_experts",),
        renormalise=False,
        groups="by_method",
        scale="routed_scaling_factor",
        shared="by_count",
        dense="first",
    ),
    refused={"mlp_bias": False, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax"},
    sizes=sizes(102400, 4096, 11008, 32, 32, 2048)
    | LATENT_SIZES
    | {
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 1.0,
    },
    defaults={"eos_token_id": 2, "rope_interleave": True, "topk_method": "greedy"},
)

LATENT: Mapping[str, Family] = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    # the same under a name of its own
    "kimi_k2": DEEPSEEK_V3,
}
