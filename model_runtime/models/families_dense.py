"""Families of dense text models beside those in `families.py`, whose language models towers stand on: rows of the same
table. Does not import torch.
"""

from collections.abc import Mapping
from dataclasses import replace

from model_runtime.models.family import Family, sizes

GLM = Family(
    qkv_bias="attention_bias",
    interleaved_rope=True,
    partial_rotary=True,
    sizes=sizes(151552, 4096, 13696, 40, 32, 131072),
    defaults={
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
)

COHERE = Family(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    is_layer_norm=True,
    norm_places="parallel",
    interleaved_rope=True,
    scales=("logit_scale",),
    refused={"use_qk_norm": False},
    sizes=sizes(256000, 8192, 22528, 40, 64, 8192),
    defaults={
        "eos_token_id": 255001,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
    },
)

DENSE: Mapping[str, Family] = {
    "cohere": replace(COHERE, defaults={**COHERE.defaults, "rope_theta": 500000.0}),
    "cohere2": replace(
        COHERE,
        windows="by_type",
        unrotated="whole_layers",
        defaults={**COHERE.defaults, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "exaone4": Family(
        qk_norm="head",
        norm_places="after",
        windows="by_type",
        unrotated="whole_layers_beside_windows",
        sizes=sizes(102400, 4096, 16384, 32, 32, 2048),
        defaults={
            "eos_token_id": 2,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "glm": GLM,
    "glm4": replace(
        GLM,
        norm_places="around",
        renamed={
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
            "post_self_attn_layernorm": "post_attention_layernorm",
        },
    ),
    "granite": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        scales=("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
        sizes=sizes(32000, 4096, 11008, 32, 32, 2048),
        defaults={
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "eos_token_id": 2,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
        },
    ),
    "olmo2": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="row",
        norm_places="after",
        sizes=sizes(50304, 4096, 11008, 32, 32, 2048),
        defaults={"eos_token_id": 50279, "rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="row",
        norm_places="after",
        windows="by_type",
        local_rope=True,
        sizes=sizes(50304, 4096, 11008, 32, 32, 2048),
        defaults={
            "eos_token_id": 50279,
            "rms_norm_eps": 1e-5,
            "rope_local_base_freq": 500000.0,
            "rope_theta": 500000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "phi3": Family(
        windows="all_layers",
        partial_rotary=True,
        sizes=sizes(32064, 3072, 8192, 32, 32, 4096),
        defaults={
            "eos_token_id": 32000,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
            "rms_norm_eps": 1e-5,
        },
    ),
    "seed_oss": Family(
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        sizes=sizes(155136, 4096, 27648, 64, 80, 524288),
        defaults={
            "attention_bias": True,
            "attention_out_bias": False,
            "eos_token_id": 2,
            "head_dim": 128,
            "num_key_value_heads": 8,
        },
    ),
    "smollm3": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows="by_type_or_unrotated",
        unrotated="listed",
        sizes=sizes(128256, 2048, 11008, 36, 16, 32768),
        defaults={
            "eos_token_id": 128001,
            "no_rope_layer_interval": 4,
            "no_rope_layers": None,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
    ),
}
