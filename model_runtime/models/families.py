"""What distinguishes one family of models from another: tables of names and flags, not code.

Read by `hf_config.py` and `weights/gguf_config.py` in the engine process; does not import torch. A new family is a new
row; a block that no row can describe yet is a new field here and in `ModelConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of Hugging Face's config.json. A flag is fixed, or a string: the config key that decides it."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    """Each query and key head is RMS-normalised before it is rotated."""
    windows: Literal["none", "all_layers", "by_layer", "by_type"] = "none"
    """Which layers attend to `sliding_window` keys only. by_layer: as `layer_types` says, or under
    `use_sliding_window` the layers from `max_window_layers` on. by_type: as `layer_types` says, or all but every
    `sliding_window_pattern`-th."""
    is_gemma: bool = False
    """Gemma 3: norm weights less 1, sandwich norms, scaled embeddings, tanh GELU under the key `hidden_activation`,
    scores scaled by `query_pre_attn_scalar`."""
    is_deepseek: bool = False
    """DeepSeek-V3: latent attention and a mixture of experts."""
    local_rope: bool = False
    """Layers with a sliding window have rope parameters of their own."""
    mrope_sections: tuple[int, int, int] | None = None
    """For models whose rotations count rows and columns of images: the sections of a file that names none."""
    mrope_interleaved: bool = False
    sizes: Mapping[str, object] = field(default_factory=dict)
    """Sizes that the text_config of a vision-language model may leave out."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of config keys that a file may leave out, where they differ from hf_config.COMMON_DEFAULTS."""


def _sizes(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, positions: int) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
    }


DEEPSEEK_V3 = Family(
    is_deepseek=True,
    sizes=_sizes(129280, 7168, 18432, 61, 128, 4096)
    | {
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "v_head_dim": 128,
    },
    defaults={"eos_token_id": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 1, "rope_interleave": True},
)
"""Also what Kimi K2 is, which names itself apart."""

FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "llama": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        sizes=_sizes(32000, 4096, 11008, 32, 32, 2048),
        defaults={"eos_token_id": 2},
    ),
    "mistral": Family(
        windows="all_layers",
        sizes=_sizes(32000, 4096, 14336, 32, 32, 131072),
        defaults={"eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        qkv_bias=True,
        windows="by_layer",
        sizes=_sizes(151936, 4096, 22016, 32, 32, 32768),
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        windows="by_layer",
        sizes=_sizes(151936, 4096, 22016, 32, 32, 32768),
        defaults={"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "gemma3_text": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        windows="by_type",
        is_gemma=True,
        local_rope=True,
        sizes=_sizes(262208, 2304, 9216, 26, 8, 131072),
        defaults={
            "attn_logit_softcapping": None,
            "eos_token_id": 1,
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1000000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
            "use_bidirectional_attention": False,
        },
    ),
    "qwen2_vl_text": Family(
        qkv_bias=True,
        windows="by_layer",
        mrope_sections=(16, 24, 24),
        sizes=_sizes(152064, 8192, 29568, 80, 64, 32768),
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
        qk_norm=True,
        mrope_sections=(24, 20, 20),
        mrope_interleaved=True,
        sizes=_sizes(151936, 4096, 22016, 32, 32, 128000),
        defaults={"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 500000.0},
    ),
}
