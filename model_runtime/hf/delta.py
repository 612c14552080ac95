"""Reads what a config.json says of layers with a state in place of attention, in the keys of each family. Called by
`hf/config.py` as `Family.finish` of rows in `models/families_hybrid.py`, engine and worker processes; does not import
torch."""

import math
from dataclasses import replace

from model_runtime.architecture import DeltaRule, ModelConfig
from model_runtime.hf.values import Json, fail, integer, layer_list, mapping, value_of

KERNEL = "linear_conv_kernel_dim"
FULL_EACH = 4
"""Where nothing says which of Kimi's layers have attention, each of those with such a number has."""
LAYER_TYPES = ("linear_attention", "full_attention")


def with_gated_delta_net(read: ModelConfig, config: Json, *, interleaved: bool = False) -> ModelConfig:
    """Qwen3.5, and Qwen3-Next, which is `interleaved`. Raises CheckpointError naming the key that is wrong."""
    key_heads, value_heads = integer(config, "linear_num_key_heads"), integer(config, "linear_num_value_heads")
    if value_heads % key_heads:
        fail("linear_num_value_heads", value_heads, f"a multiple of the {key_heads} key heads")
    rule = DeltaRule(
        layers=_layers(config, read.num_layers),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=integer(config, "linear_key_head_dim"),
        value_dim=integer(config, "linear_value_head_dim"),
        conv_width=integer(config, KERNEL),
        interleaved=interleaved,
        gate="silu",
    )
    return replace(read, delta=rule, attention_gate=True, norm_weights_less_one=True)


def with_kimi_delta(read: ModelConfig, config: Json) -> ModelConfig:
    """Kimi Linear, whose attention is latent and knows no positions. Published files have keys of their own under
    linear_attn_config, and count layers from 1. Raises CheckpointError naming the key that is wrong."""
    published = mapping(config, "linear_attn_config")
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim", "short_conv_kernel_size": KERNEL}
    linear = {**config, **{names[key]: value for key, value in published.items() if key in names}}
    heads, width = integer(linear, "linear_num_heads"), integer(linear, "linear_head_dim")
    rule = DeltaRule(
        layers=_kimi_layers(config, published, read.num_layers),
        key_heads=heads,
        value_heads=heads,
        key_dim=width,
        value_dim=width,
        conv_width=integer(linear, KERNEL),
        decay_rank=width,
        decay_bound=_bound(published),
        gate="sigmoid",
        gate_rank=0 if published.get("use_full_rank_gate") else width,
    )
    return replace(read, rope=replace(read.rope, rotary_dim=0), delta=rule)


def _bound(published: Json) -> float:
    bound = published.get("gate_lower_bound")
    if bound is None:
        return 0.0
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not -math.inf < bound < 0:
        fail("linear_attn_config.gate_lower_bound", bound, "a negative number")
    return float(bound)


def _kimi_layers(config: Json, published: Json, num_layers: int) -> tuple[bool, ...]:
    if not published and config["layer_types"] is None:
        return tuple(layer == 0 or layer % FULL_EACH > 0 for layer in range(num_layers))
    if not published:
        return _layers(config, num_layers)
    delta, full = layer_list(published, "kda_layers"), layer_list(published, "full_attn_layers")
    if sorted(delta + full) != [*range(1, num_layers + 1)]:
        fail("linear_attn_config", dict(published), f"kda_layers and full_attn_layers, together 1 to {num_layers}")
    if not full:
        fail("linear_attn_config.full_attn_layers", full, "a list of at least one layer")
    return tuple(layer in delta for layer in range(1, num_layers + 1))


def _layers(config: Json, num_layers: int) -> tuple[bool, ...]:
    types = value_of(config, "layer_types")
    if types is None:
        interval = integer(config, "full_attention_interval")
        return tuple((layer + 1) % interval > 0 for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in LAYER_TYPES for kind in types):
        fail("layer_types", types, f"{num_layers} of {', '.join(LAYER_TYPES)}")
    if LAYER_TYPES[1] not in types:
        fail("layer_types", types, f"a list with a {LAYER_TYPES[1]}")
    return tuple(kind == LAYER_TYPES[0] for kind in types)
