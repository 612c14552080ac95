"""Families of text models with mixtures of experts: rows of the same table as `families.py`. Does not import torch."""

from collections.abc import Mapping
from types import MappingProxyType

from model_runtime.models.families_latent import DEEPSEEK_EXPERTS
from model_runtime.models.family import ExpertKeys, Family, sizes

MIXTRAL_NAMES = MappingProxyType({"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})

MIXTURES: Mapping[str, Family] = {
    "glm4_moe": Family(
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        partial_rotary=True,
        experts=DEEPSEEK_EXPERTS,
        draft_keys=("num_nextn_predict_layers", "num_mtp_layers"),
        sizes=sizes(151552, 4096, 10944, 46, 96, 131072),
        defaults={
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "num_mtp_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "use_qk_norm": False,
        },
    ),
    "gpt_oss": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windows="by_type",
        attention_sinks="layers",
        stacked_experts="alternating",
        experts=ExpertKeys(
            router="softmax", size="intermediate_size", renormalise=True, has_biases=True, clamp="swiglu_limit"
        ),
        refused={"swiglu_alpha": 1.702},
        renamed={"router": "gate"},
        sizes=sizes(201088, 2880, 2880, 36, 64, 131072),
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "swiglu_limit": 7.0,
        },
    ),
    "minimax_m2": Family(
        qk_norm="row",
        partial_rotary=True,
        experts=ExpertKeys(router="sigmoid", choice_bias=True, size="intermediate_size", renormalise=True),
        refused={"qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}
        | {"shared_intermediate_size": 0},
        renamed={**MIXTRAL_NAMES, "e_score_correction_bias": "gate.e_score_correction_bias"},
        sizes=sizes(200064, 3072, 1536, 62, 48, 196608),
        defaults={
            "eos_token_id": 200020,
            "head_dim": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "rope_theta": 5000000.0,
        },
    ),
    "mixtral": Family(
        windows="all_layers",
        experts=ExpertKeys(router="softmax", size="intermediate_size", renormalise=True),
        renamed=MIXTRAL_NAMES,
        sizes=sizes(32000, 4096, 14336, 32, 32, 131072),
        defaults={
            "eos_token_id": 2,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
        },
    ),
    "olmoe": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="row",
        experts=ExpertKeys(router="softmax", size="intermediate_size"),
        sizes=sizes(50304, 2048, 2048, 16, 16, 4096),
        defaults={
            "eos_token_id": 50279,
            "norm_topk_prob": False,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        experts=ExpertKeys(router="softmax", shared="by_size", dense="by_step"),
        refused={"use_sliding_window": False},
        renamed={"shared_expert": "shared_experts"},
        sizes=sizes(151936, 2048, 5632, 24, 16, 32768),
        defaults={
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3_moe": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
        experts=ExpertKeys(router="softmax", dense="by_step"),
        refused={"use_sliding_window": False},
        sizes=sizes(151936, 2048, 6144, 24, 32, 32768),
        defaults={
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
        },
    ),
}
