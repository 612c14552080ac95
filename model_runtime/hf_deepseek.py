"""Reads what a config.json says about DeepSeek-V3's attention and experts. Called by `hf_config.py` in the engine
process; does not import torch."""

import math
from dataclasses import replace

from model_runtime.architecture import Experts, LatentAttention, ModelConfig
from model_runtime.hf_rope import rope_parameters
from model_runtime.hf_values import Json, fail, flag, integer, number, value_of
from model_runtime.weights.errors import CheckpointError

REFUSED: Json = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Options of older models of the kind, which transformers does not read here, and the values that it means."""


def with_deepseek(read: ModelConfig, config: Json) -> ModelConfig:
    """`read` had the rotated channels of a head for a head; the result has all channels, and what else there is.

    `config` has all defaults filled in. Raises CheckpointError naming the key that is wrong or not supported.
    """
    for key, value in REFUSED.items():
        if config.get(key, value) != value:
            fail(key, config[key], repr(value))
    if read.num_kv_heads != read.num_heads:
        fail("num_key_value_heads", read.num_kv_heads, f"{read.num_heads}, the number of query heads")
    head_dim = integer(config, "qk_nope_head_dim") + read.rope.rotary_dim
    return replace(
        read,
        head_dim=head_dim,
        rope=replace(read.rope, interleaved=flag(config, "rope_interleave")),
        attention_scale=head_dim**-0.5 * _scale_factor(read, config),
        latent=_latent(config, head_dim),
        experts=_experts(config),
        num_draft_layers=_from_zero(config, "num_nextn_predict_layers"),
    )


def _scale_factor(read: ModelConfig, config: Json) -> float:
    """What YaRN multiplies the scores with; the table of rotations has its other factor."""
    rope = rope_parameters(config)
    if read.rope.kind == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return (0.1 * number(rope, "mscale_all_dim") * math.log(max(read.rope.factor, 1.0)) + 1.0) ** 2


def _latent(config: Json, head_dim: int) -> LatentAttention:
    value_dim = integer(config, "v_head_dim")
    if value_dim > head_dim:
        fail("v_head_dim", value_dim, f"at most qk_nope_head_dim and qk_rope_head_dim together, {head_dim}")
    return LatentAttention(
        query_rank=0 if value_of(config, "q_lora_rank") is None else integer(config, "q_lora_rank"),
        latent_rank=integer(config, "kv_lora_rank"),
        value_dim=value_dim,
        bias=flag(config, "attention_bias"),
    )


def _experts(config: Json) -> Experts:
    num_experts, num_groups = integer(config, "n_routed_experts"), integer(config, "n_group")
    num_chosen, num_chosen_groups = integer(config, "num_experts_per_tok"), integer(config, "topk_group")
    per_group = num_experts // num_groups
    if per_group < 2 or num_experts % num_groups:
        raise CheckpointError(f"config.json: {num_experts} experts do not make {num_groups} groups of 2 or more")
    if num_chosen_groups > num_groups or num_chosen > num_chosen_groups * per_group:
        raise CheckpointError(
            f"config.json: {num_chosen} experts cannot be chosen from {num_chosen_groups} of {num_groups} groups of "
            f"{per_group}"
        )
    size = integer(config, "moe_intermediate_size")
    return Experts(
        first_layer=_from_zero(config, "first_k_dense_replace"),
        num_experts=num_experts,
        num_chosen=num_chosen,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        intermediate_size=size,
        shared_size=size * integer(config, "n_shared_experts"),
        renormalise=flag(config, "norm_topk_prob"),
        scale=number(config, "routed_scaling_factor"),
    )


def _from_zero(config: Json, key: str) -> int:
    value = value_of(config, key)
    return 0 if value == 0 and value is not False else integer(config, key)
