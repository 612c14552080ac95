"""Reads what a config.json says about MiMo-V2, in the keys of transformers and of published files. Called by
`hf/config.py`, engine and worker processes; does not import torch."""

from dataclasses import replace

from model_runtime.architecture import ModelConfig
from model_runtime.hf.values import Json, fail, integer, number

FULL_EVERY = 6
"""Layers that see all keys, beside the first, of a file that does not say."""


def mimo_keys(config: Json) -> Json:
    """The configuration in the keys of transformers."""
    count = integer(config, "num_hidden_layers")
    read = {"routed_scaling_factor": 1.0} | {key: value for key, value in config.items() if value is not None}
    full, sparse = read.get("hybrid_layer_pattern"), read.get("moe_layer_freq")
    is_full = [layer == 0 or (layer + 1) % FULL_EVERY == 0 for layer in range(count)]
    if full is not None:
        is_full = [kind == 0 for kind in _numbers(full, "hybrid_layer_pattern", count)]
    is_sparse = [layer > 0 for layer in range(count)]
    if sparse is not None:
        is_sparse = [kind == 1 for kind in _numbers(sparse, "moe_layer_freq", count)]
    read.setdefault("layer_types", ["full_attention" if full else "sliding_attention" for full in is_full])
    read.setdefault("mlp_layer_types", ["sparse" if sparse else "dense" for sparse in is_sparse])
    if "sliding_window_size" in read:  # which does not count the query's own key
        read["sliding_window"] = integer(read, "sliding_window_size") + 1
    return read


def _numbers(value: object, key: str, count: int) -> list[int]:
    if not isinstance(value, list) or len(value) != count or any(kind not in (0, 1) for kind in value):
        fail(key, value, f"{count} of 0 and 1")
    return value


def with_mimo(read: ModelConfig, config: Json) -> ModelConfig:
    """The same architecture with values of another length than keys, and other key/value heads beside windows.

    `config` has all defaults filled in. Raises CheckpointError naming the key that is wrong or not supported.
    """
    for key, other in (("head_dim", "swa_head_dim"), ("v_head_dim", "swa_v_head_dim")):
        if config.get(other, config[key]) != config[key]:
            fail(other, config[other], f"{config[key]}, as {key}")
    if config.get("swa_num_attention_heads", read.num_heads) != read.num_heads:
        fail("swa_num_attention_heads", config["swa_num_attention_heads"], f"{read.num_heads}, as num_attention_heads")
    value_dim = integer(config, "v_head_dim")
    if value_dim > read.head_dim:
        fail("v_head_dim", value_dim, f"at most head_dim, {read.head_dim}")
    key = "swa_num_key_value_heads"
    windowed = integer(config, key) if key in config else 2 * read.num_kv_heads
    if windowed % read.num_kv_heads or read.num_heads % windowed:
        fail(key, windowed, f"a multiple of num_key_value_heads {read.num_kv_heads} that divides {read.num_heads}")
    scale = "attention_value_scale"
    return replace(
        read,
        value_dim=value_dim,
        value_scale=1.0 if config[scale] is None else number(config, scale),
        windowed_kv_heads=windowed,
        attention_sinks="windows",
    )
