"""Reads what a config.json says about DeepSeek-V3's attention. Called by `hf/config.py`, engine and worker
processes; does not import torch."""

import math
from dataclasses import replace

from model_runtime.architecture import LatentAttention, ModelConfig
from model_runtime.hf.rope import rope_parameters
from model_runtime.hf.values import Json, fail, flag, integer, number, value_of


def with_latent(read: ModelConfig, config: Json) -> ModelConfig:
    """`read` had the rotated channels of a head for a head; the result has all channels, and what else there is.

    `config` has all defaults filled in. Raises CheckpointError naming the key that is wrong or not supported.
    """
    if read.num_kv_heads != read.num_heads:
        fail("num_key_value_heads", read.num_kv_heads, f"{read.num_heads}, the number of query heads")
    head_dim = integer(config, "qk_nope_head_dim") + read.rope.rotary_dim
    return replace(
        read,
        head_dim=head_dim,
        rope=replace(read.rope, interleaved=flag(config, "rope_interleave")),
        attention_scale=head_dim**-0.5 * _scale_factor(read, config),
        latent=_latent(config),
    )


def _scale_factor(read: ModelConfig, config: Json) -> float:
    """What YaRN multiplies the scores with; the table of rotations has its other factor."""
    rope = rope_parameters(config)
    if read.rope.kind == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return (0.1 * number(rope, "mscale_all_dim") * math.log(max(read.rope.factor, 1.0)) + 1.0) ** 2


def _latent(config: Json) -> LatentAttention:
    return LatentAttention(
        query_rank=0 if value_of(config, "q_lora_rank") is None else integer(config, "q_lora_rank"),
        latent_rank=integer(config, "kv_lora_rank"),
        shared_dim=integer(config, "qk_rope_head_dim"),
        value_dim=integer(config, "v_head_dim"),
        bias=flag(config, "attention_bias"),
    )
