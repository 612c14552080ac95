"""Which families of models there are: a table of names and flags, not code. A new family is a new row.

Read by way of `packages.py`, engine and worker processes; does not import torch.
"""

from collections.abc import Mapping

from model_runtime.models.families_dense import DENSE
from model_runtime.models.families_experts import MIXTURES
from model_runtime.models.families_hybrid import HYBRIDS
from model_runtime.models.families_latent import LATENT
from model_runtime.models.families_mixed import MIXED
from model_runtime.models.family import Family, sizes

FAMILIES: Mapping[str, Family] = {
    **DENSE,
    **LATENT,
    **MIXTURES,
    **MIXED,
    **HYBRIDS,
    "llama": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        sizes=sizes(32000, 4096, 11008, 32, 32, 2048),
        defaults={"eos_token_id": 2},
    ),
    "mistral": Family(
        windows="all_layers",
        sizes=sizes(32000, 4096, 14336, 32, 32, 131072),
        defaults={"eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "ministral": Family(
        windows="all_or_by_type",
        sizes=sizes(32000, 4096, 14336, 32, 32, 131072),
        defaults={"eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "ministral3": Family(
        windows="all_layers",
        growth="by_rope",
        sizes=sizes(131072, 4096, 14336, 34, 32, 262144),
        defaults={
            "eos_token_id": 2,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "qwen2": Family(
        qkv_bias=True,
        windows="by_layer",
        sizes=sizes(151936, 4096, 22016, 32, 32, 32768),
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
        windows="by_layer",
        sizes=sizes(151936, 4096, 22016, 32, 32, 32768),
        defaults={"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "gemma2": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        norm_places="around",
        windows="by_type",
        is_gemma=True,
        scales=("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
        refused={"use_bidirectional_attention": False},
        sizes=sizes(256000, 2304, 9216, 26, 8, 8192),
        defaults={
            "attn_logit_softcapping": 50.0,
            "eos_token_id": 1,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
        windows="by_type",
        norm_places="around",
        is_gemma=True,
        local_rope=True,
        scales=("query_pre_attn_scalar",),
        refused={
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        sizes=sizes(262208, 2304, 9216, 26, 8, 131072),
        defaults={
            "eos_token_id": 1,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1000000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_vl_text": Family(
        qkv_bias=True,
        windows="by_layer",
        mrope_sections=(16, 24, 24),
        sizes=sizes(152064, 8192, 29568, 80, 64, 32768),
        defaults={
            "eos_token_id": 151645,
            "max_window_layers": 80,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": 4096,
        },
    ),
    "qwen3_vl_text": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
        mrope_sections=(24, 20, 20),
        mrope_interleaved=True,
        sizes=sizes(151936, 4096, 22016, 32, 32, 128000),
        defaults={"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 500000.0},
    ),
}
