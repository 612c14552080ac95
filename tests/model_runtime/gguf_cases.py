"""For each architecture of GGUF files a tiny model of transformers that its files can say, and what llama.cpp's
converter writes beyond the keys of all: for `test_gguf_families.py`."""

import math
from collections.abc import Callable

import gguf
import numpy as np
from gguf import GGUFWriter
from transformers import PreTrainedModel

from tests.family_draws import Overrides

ROPE = {"rope_type": "default", "rope_theta": 300.0}
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 300.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [1.0 + 0.5 * index for index in range(8)],
}
ALL_SPARSE: Overrides = {"mlp_only_layers": [], "decoder_sparse_step": 1}
SLIDING, FULL = "sliding_attention", "full_attention"
Keys = Callable[[GGUFWriter, PreTrainedModel], None]


def nothing(writer: GGUFWriter, model: PreTrainedModel) -> None:
    """The keys of all are enough."""


def experts(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    is_oss = config.model_type == "gpt_oss"
    writer.add_expert_feed_forward_length(config.intermediate_size if is_oss else config.moe_intermediate_size)


def experts_alone(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def qwen2moe(writer: GGUFWriter, model: PreTrainedModel) -> None:
    experts(writer, model)
    writer.add_expert_shared_feed_forward_length(model.config.shared_expert_intermediate_size)


def yarn(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(YARN["factor"])
    writer.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])


def gpt_oss(writer: GGUFWriter, model: PreTrainedModel) -> None:
    experts(writer, model)
    writer.add_sliding_window(model.config.sliding_window)
    yarn(writer)


def granite(writer: GGUFWriter, model: PreTrainedModel) -> None:
    writer.add_attention_scale(model.config.attention_multiplier)
    writer.add_embedding_scale(model.config.embedding_multiplier)
    writer.add_residual_scale(model.config.residual_multiplier)
    writer.add_logit_scale(model.config.logits_scaling)


def command_r(writer: GGUFWriter, model: PreTrainedModel) -> None:
    writer.add_layer_norm_eps(model.config.layer_norm_eps)
    writer.add_logit_scale(model.config.logit_scale)


def cohere2(writer: GGUFWriter, model: PreTrainedModel) -> None:
    command_r(writer, model)
    writer.add_sliding_window(model.config.sliding_window)


def windows(writer: GGUFWriter, model: PreTrainedModel) -> None:
    writer.add_sliding_window(model.config.sliding_window)
    writer.add_sliding_window_pattern([kind == SLIDING for kind in model.config.layer_types])


def olmo3(writer: GGUFWriter, model: PreTrainedModel) -> None:
    windows(writer, model)
    yarn(writer)
    writer.add_rope_scaling_yarn_attn_factor(0.1 * math.log(YARN["factor"]) + 1.0)


def gemma2(writer: GGUFWriter, model: PreTrainedModel) -> None:
    writer.add_sliding_window(model.config.sliding_window)
    writer.add_attn_logit_softcapping(model.config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(model.config.final_logit_softcapping)


def gemma3(writer: GGUFWriter, model: PreTrainedModel) -> None:
    writer.add_sliding_window(model.config.sliding_window)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def half_rotated(writer: GGUFWriter, model: PreTrainedModel) -> None:
    writer.add_rope_dimension_count(model.config.head_dim // 2)


def phi3(writer: GGUFWriter, model: PreTrainedModel) -> None:
    writer.add_rope_scaling_orig_ctx_len(model.config.original_max_position_embeddings)
    writer.add_sliding_window(model.config.sliding_window or 0)
    writer.add_rope_dimension_count(model.config.hidden_size // model.config.num_attention_heads)


def phi3_long(writer: GGUFWriter, model: PreTrainedModel) -> None:
    phi3(writer, model)
    original = LONGROPE["original_max_position_embeddings"]
    growth = math.log(model.config.max_position_embeddings / original) / math.log(original)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + growth))
    for kind in ("short", "long"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(LONGROPE[f"{kind}_factor"], dtype=np.float32))


def routed(writer: GGUFWriter, model: PreTrainedModel) -> None:
    """Of mixtures as DeepSeek's."""
    config = model.config
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def glm4moe(writer: GGUFWriter, model: PreTrainedModel) -> None:
    """With a layer for drafts, of which there is a tensor here."""
    routed(writer, model)
    half_rotated(writer, model)
    writer.add_expert_weights_norm(model.config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_block_count(model.config.num_hidden_layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_tensor(f"blk.{model.config.num_hidden_layers}.nextn.hnorm.weight", np.ones(64, dtype=np.float32))


def deepseek2(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    routed(writer, model)
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    yarn(writer)
    writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def deepseek3(writer: GGUFWriter, model: PreTrainedModel) -> None:
    deepseek2(writer, model)
    writer.add_expert_weights_norm(model.config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


LATENT: Overrides = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 20,
    "v_head_dim": 12,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
}
CASES: dict[str, tuple[str, Overrides, Keys]] = {
    "cohere2": (
        "cohere2",
        {
            "attention_bias": False,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL, SLIDING],
            "num_hidden_layers": 5,
            "tie_word_embeddings": True,
        },
        cohere2,
    ),
    "command-r": ("cohere", {"tie_word_embeddings": True, "attention_bias": False}, command_r),
    "deepseek2": (
        "deepseek_v2",
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
        deepseek2,
    ),
    "deepseek2 sigmoid": ("deepseek_v3", LATENT | {"norm_topk_prob": True, "n_group": 2, "topk_group": 1}, deepseek3),
    "exaone4": ("exaone4", {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}, windows),
    "exaone4 whole": ("exaone4", {"sliding_window": None, "layer_types": [FULL] * 3}, nothing),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "layer_types": [SLIDING, FULL, SLIDING], "query_pre_attn_scalar": 16}
        | {"sliding_window": 9, "tie_word_embeddings": True},
        gemma2,
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "layer_types": [SLIDING] * 5 + [FULL, SLIDING],
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 300.0, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
        gemma3,
    ),
    "glm4": ("glm4", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "attention_bias": True}, half_rotated),
    "glm4moe": (
        "glm4_moe",
        {
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
            "topk_group": 1,
            "use_qk_norm": True,
        },
        glm4moe,
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {**YARN, "truncate": False},
            "attention_bias": True,
            "intermediate_size": 32,
            "swiglu_limit": 7.0,
        },
        gpt_oss,
    ),
    "granite": ("granite", {"mlp_bias": False, "attention_bias": False}, granite),
    "llama mixture": ("mixtral", {"sliding_window": None}, experts_alone),
    "olmo2": ("olmo2", {"attention_bias": False}, nothing),
    "olmo2 windows": (
        "olmo3",
        {
            "attention_bias": False,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {FULL: YARN, SLIDING: ROPE},
            "sliding_window": 9,
        },
        olmo3,
    ),
    "olmoe": ("olmoe", {"attention_bias": False, "norm_topk_prob": False}, experts_alone),
    "phi3": ("phi3", {"sliding_window": 9}, phi3),
    "phi3 longrope": (
        "phi3",
        {"sliding_window": None, "original_max_position_embeddings": 16, "rope_parameters": LONGROPE},
        phi3_long,
    ),
    "qwen2moe": ("qwen2_moe", {**ALL_SPARSE, "norm_topk_prob": False, "qkv_bias": True}, qwen2moe),
    "qwen3moe": ("qwen3_moe", {**ALL_SPARSE, "norm_topk_prob": True, "attention_bias": False}, experts),
    "seed_oss": ("seed_oss", {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}, nothing),
    "smollm3": (
        "smollm3",
        {"no_rope_layers": None, "num_hidden_layers": 5, "attention_bias": False, "mlp_bias": False},
        nothing,
    ),
}
"""By architecture and variant, with what its files cannot say otherwise: llama, qwen2 and qwen3 are in test_gguf.py."""
