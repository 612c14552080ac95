"""Reads the config.json of a Hugging Face checkpoint into a `ModelConfig`. The only place that fills in defaults.

Called by `checkpoint.py` in the engine process; does not import torch. Both spellings of keys that transformers 5
renamed are accepted (`rope_parameters`, or `rope_theta` with `rope_scaling`). What is not supported is refused by name.
"""

import math
from collections.abc import Mapping
from typing import NoReturn

from model_runtime.config import ModelConfig, RopeConfig
from model_runtime.models.families import FAMILIES, Family
from model_runtime.weights.errors import CheckpointError

Json = Mapping[str, object]

COMMON_DEFAULTS: Json = {
    "attention_bias": False,
    "eos_token_id": None,
    "head_dim": None,
    "hidden_act": "silu",
    "layer_types": None,
    "mlp_bias": False,
    "num_key_value_heads": None,
    "quantization_config": None,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
"""What transformers assumes for keys that a config.json may leave out."""

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def _fail(key: str, value: object, wanted: str) -> NoReturn:
    raise CheckpointError(f"config.json: {key} must be {wanted}, not {value!r}")


def _value(config: Json, key: str) -> object:
    if key not in config:
        raise CheckpointError(f"config.json: {key} is missing")
    return config[key]


def _integer(config: Json, key: str) -> int:
    value = _value(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        _fail(key, value, "a positive integer")
    return value


def _number(config: Json, key: str) -> float:
    value = _value(config, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        _fail(key, value, "a positive number")
    return float(value)


def _flag(config: Json, key: bool | str) -> bool:
    """A fixed flag, or the one that the named key holds."""
    if isinstance(key, bool):
        return key
    value = _value(config, key)
    if not isinstance(value, bool):
        _fail(key, value, "true or false")
    return value


def _mapping(config: Json, key: str) -> Json:
    value = config[key]
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        _fail(key, value, "an object")
    return value


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """What YaRN (arXiv 2309.00071, eq. 22) multiplies cosines and sines with; a ratio if DeepSeek's mscales are set."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _rope_parameters(config: Json) -> dict[str, object]:
    """One flat object with `rope_type` and `rope_theta`, from either spelling."""
    found = {"rope_theta": config["rope_theta"]} | dict(_mapping(config, "rope_scaling"))
    found |= _mapping(config, "rope_parameters")
    found["rope_type"] = found.get("rope_type", found.get("type", "default"))
    if found.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("config.json: partial_rotary_factor other than 1 is not supported")
    return found


def _rope(config: Json, head_dim: int) -> RopeConfig:
    rope = _rope_parameters(config)
    theta = _number(rope, "rope_theta")
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported; {', '.join(ROPE_TYPES)} are")
    if kind in ("default", "dynamic"):
        # dynamic differs from default only beyond max_position_embeddings, which is where this server's limit lies
        return RopeConfig(theta=theta, rotary_dim=head_dim)
    factor = _number(rope, "factor")
    if kind == "linear":
        return RopeConfig(theta=theta, rotary_dim=head_dim, kind="linear", factor=factor)
    original = _integer(
        {"original_max_position_embeddings": config["max_position_embeddings"]} | rope,
        "original_max_position_embeddings",
    )
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            rotary_dim=head_dim,
            kind="llama3",
            factor=factor,
            low_freq_factor=_number(rope, "low_freq_factor"),
            high_freq_factor=_number(rope, "high_freq_factor"),
            original_max_position=original,
        )
    return _yarn(rope, theta, head_dim, factor, original)


def _yarn(rope: dict[str, object], theta: float, head_dim: int, factor: float, original: int) -> RopeConfig:
    if rope.get("truncate", True) is not True:
        raise CheckpointError("config.json: yarn with truncate=false is not supported")
    given = {key: value for key, value in rope.items() if value is not None}
    mscales = [_number(given, key) if key in given else 0.0 for key in ("mscale", "mscale_all_dim")]
    default = yarn_attention_factor(factor, mscales[0], mscales[1])
    betas = {"beta_fast": 32.0, "beta_slow": 1.0} | given
    return RopeConfig(
        theta=theta,
        rotary_dim=head_dim,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=_number(betas, "beta_fast"),
        beta_slow=_number(betas, "beta_slow"),
        attention_factor=_number({"attention_factor": default} | given, "attention_factor"),
    )


def _windows(config: Json, family: Family, num_layers: int) -> tuple[int, ...]:
    """Per layer the number of keys in sight, 0 for all."""
    if family.windows == "none" or config["sliding_window"] is None:
        return (0,) * num_layers
    if family.windows == "all_layers":
        return (_integer(config, "sliding_window"),) * num_layers
    if not _flag(config, "use_sliding_window"):
        return (0,) * num_layers
    window, layer_types = _integer(config, "sliding_window"), config["layer_types"]
    if layer_types is None:
        first = config["max_window_layers"]
        if not isinstance(first, int) or first < 0:
            _fail("max_window_layers", first, "an integer from 0")
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    sizes = {"sliding_attention": window, "full_attention": 0}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or not sizes.keys() >= set(layer_types):
        _fail("layer_types", layer_types, f"{num_layers} of {', '.join(sizes)}")
    return tuple(sizes[layer_type] for layer_type in layer_types)


def _eos_token_ids(config: Json, generation_config: Json | None) -> tuple[int, ...]:
    """generation_config.json is newer and lists every end token of a chat model; config.json is the fallback."""
    value = None if generation_config is None else generation_config.get("eos_token_id")
    value = config["eos_token_id"] if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        _fail("eos_token_id", value, "a token id or a list of token ids")
    return tuple(ids)


def _family(config: Json) -> tuple[str, Family]:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"config.json: model_type {name!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    return name, FAMILIES[name]


def _head_dim(config: Json, num_heads: int) -> int:
    if config["head_dim"] is not None:
        return _integer(config, "head_dim")
    return _integer(config, "hidden_size") // num_heads


def check_shapes(config: ModelConfig) -> ModelConfig:
    """The same config. Raises CheckpointError for head counts and sizes that contradict each other."""
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(f"{config.num_heads} query heads do not divide among {config.num_kv_heads} key heads")
    if config.head_dim % 2:
        raise CheckpointError(f"head_dim {config.head_dim} is odd and cannot be rotated in pairs")
    if any(token >= config.vocab_size for token in config.eos_token_ids):
        raise CheckpointError(f"end tokens {list(config.eos_token_ids)} exceed the vocabulary of {config.vocab_size}")
    return config


def read_hf_config(config: Json, generation_config: Json | None) -> ModelConfig:
    """The architecture that config.json describes. Raises CheckpointError naming the key that is wrong, missing or not
    supported."""
    name, family = _family(config)
    config = {**COMMON_DEFAULTS, **family.defaults, **config}
    if config["hidden_act"] != "silu":
        _fail("hidden_act", config["hidden_act"], "'silu'")
    if config["quantization_config"] is not None:
        raise CheckpointError("config.json: quantization_config is not supported; use unquantised weights or GGUF")
    num_layers, num_heads = _integer(config, "num_hidden_layers"), _integer(config, "num_attention_heads")
    has_kv_heads = config["num_key_value_heads"] is not None
    head_dim = _head_dim(config, num_heads)
    rope = _rope(config, head_dim)
    max_position = _integer(config, "max_position_embeddings")
    if rope.kind == "yarn":
        # published configs keep the trained length in max_position_embeddings; yarn extends it by the factor
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    return check_shapes(
        ModelConfig(
            family=name,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=_integer(config, "hidden_size"),
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_integer(config, "num_key_value_heads") if has_kv_heads else num_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(config, "rms_norm_eps"),
            max_position=max_position,
            rope=rope,
            sliding_windows=_windows(config, family, num_layers),
            qkv_bias=_flag(config, family.qkv_bias),
            output_bias=_flag(config, family.output_bias),
            mlp_bias=_flag(config, family.mlp_bias),
            qk_norm=family.qk_norm,
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            eos_token_ids=_eos_token_ids(config, generation_config),
        )
    )
