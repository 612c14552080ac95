"""Reads the config.json of a Hugging Face checkpoint into a `ModelConfig`. The only place that fills in defaults.

Called by `opening.py`, engine and worker processes; does not import torch. Both spellings of keys that transformers 5
renamed are accepted (`rope_parameters`, or `rope_theta` with `rope_scaling`). Of a vision-language model this reads the
language side, and what the language side must know of images. What is not supported is refused by name.
"""

import math
from dataclasses import replace

from model_runtime.architecture import ModelConfig, RopeConfig
from model_runtime.hf.deepseek import with_latent
from model_runtime.hf.experts import with_experts
from model_runtime.hf.layers import read_chunks, read_rotations, read_windows
from model_runtime.hf.mimo import mimo_keys
from model_runtime.hf.quantization import is_mxfp4, read_quantization
from model_runtime.hf.scales import refuse_structure, with_scales
from model_runtime.hf.values import Json, fail, flag, integer, mapping, number, value_of
from model_runtime.models.composites import COMPOSITES, Composite
from model_runtime.models.family import Family
from model_runtime.models.packages import family_named, known_families, other_contracts
from model_runtime.weights.errors import CheckpointError

COMMON_DEFAULTS: Json = {
    "attention_bias": False,
    "eos_token_id": None,
    "head_dim": None,
    "is_causal": True,
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

DEEPSTACK_LAYERS = (8, 16, 24)
"""Of a Qwen3-VL tower whose file does not say."""


def _eos_token_ids(config: Json, generation_config: Json | None) -> tuple[int, ...]:
    """generation_config.json is newer and lists every end token of a chat model; config.json is the fallback."""
    value = None if generation_config is None else generation_config.get("eos_token_id")
    value = config["eos_token_id"] if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        fail("eos_token_id", value, "a token id or a list of token ids")
    return tuple(ids)


def _model_type(name: object, key: str, composites: Json) -> str:
    """A model_type that there is something for."""
    known = {*known_families(), *composites}
    if isinstance(name, str) and name in known:
        return name
    elsewhere = other_contracts(name) if isinstance(name, str) else ""
    raise CheckpointError(
        f"config.json: {key} {name!r} is not supported; supported are {', '.join(sorted(known))}"
        f"{elsewhere or '; docs/new-model.md says how a package brings another'}"
    )


def _head_dim(config: Json, num_heads: int) -> int:
    if config["head_dim"] is not None:
        return integer(config, "head_dim")
    return integer(config, "hidden_size") // num_heads


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
    name = _model_type(config.get("model_type"), "model_type", COMPOSITES)
    if name in COMPOSITES:
        return _read_composite(config, COMPOSITES[name], generation_config)
    return _read_text(config, name, generation_config)


def _read_composite(config: Json, composite: Composite, generation_config: Json | None) -> ModelConfig:
    """The language model under text_config, under the outer keys that win over its own."""
    is_flat = composite.is_flat and config.get("text_config") is None
    text = config if is_flat else mapping(config, "text_config")
    name = composite.text
    if not composite.is_fixed:
        name = _model_type(text.get("model_type", name), "text_config.model_type", {})
    family = family_named(name)
    text = {**family.sizes, **COMMON_DEFAULTS, **family.defaults, **text}
    outer = {**COMMON_DEFAULTS, "tie_word_embeddings": composite.tied, "mm_tokens_per_image": 256, **config}
    tied = flag(outer, "tie_word_embeddings") or (composite.tied_inside and flag(text, "tie_word_embeddings"))
    eos = text["eos_token_id"] if outer["eos_token_id"] is None else outer["eos_token_id"]
    stored = text["quantization_config"] if outer["quantization_config"] is None else outer["quantization_config"]
    text = {**text, "tie_word_embeddings": tied, "eos_token_id": eos, "quantization_config": stored}
    read = _read_text(text, name, generation_config)
    if composite.deepstack:
        return replace(read, num_deepstack=_deepstack(mapping(config, "vision_config"), read.num_layers))
    if composite.is_gemma:
        return replace(read, image_span=integer(outer, "mm_tokens_per_image"))
    return read


def _deepstack(vision: Json, num_layers: int) -> int:
    layers = vision.get("deepstack_visual_indexes", DEEPSTACK_LAYERS)
    if not isinstance(layers, list | tuple) or len(layers) > num_layers:
        fail("vision_config.deepstack_visual_indexes", layers, f"a list of at most {num_layers} layers")
    return len(layers)


def _gemma(read: ModelConfig, config: Json) -> ModelConfig:
    """With what the Gemmas have apart from the others."""
    if config["hidden_activation"] != "gelu_pytorch_tanh":
        fail("hidden_activation", config["hidden_activation"], "'gelu_pytorch_tanh'")
    return replace(
        read, activation="gelu_tanh", embedding_scale=math.sqrt(read.hidden_size), norm_weights_less_one=True
    )


def _max_position(config: Json, rope: RopeConfig) -> int:
    """Published configs keep the trained length in max_position_embeddings; YaRN extends it by the factor."""
    longest = integer(config, "max_position_embeddings")
    return max(longest, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else longest


def _check_supported(config: Json, family: Family) -> None:
    if not family.is_gemma and config["hidden_act"] != family.hidden_act:
        fail("hidden_act", config["hidden_act"], repr(family.hidden_act))
    if not flag(config, "is_causal"):
        fail("is_causal", False, "true: attention in both directions is not supported")
    read_quantization(config)  # which refuses what is not supported
    if is_mxfp4(config) and not family.stacked_experts:
        fail("quantization_config.quant_method", "mxfp4", "another one: this model_type has no stacks of experts")
    refuse_structure(config, family)


def _read_text(config: Json, name: str, generation_config: Json | None) -> ModelConfig:
    family = family_named(name)
    given = {family.config_names.get(key, key): value for key, value in config.items()}
    config = {**COMMON_DEFAULTS, "hidden_act": family.hidden_act, **family.defaults, **given}
    if config["rope_parameters"] is None:  # the family's rope, as without the key
        config = {**config, "rope_parameters": family.defaults.get("rope_parameters")}
    if family.is_mimo:
        config = {**config, **mimo_keys(config)}
    if family.is_latent:
        config = {**config, "head_dim": value_of(config, "qk_rope_head_dim")}
    _check_supported(config, family)
    num_layers, num_heads = integer(config, "num_hidden_layers"), integer(config, "num_attention_heads")
    has_kv_heads = config["num_key_value_heads"] is not None
    head_dim, windows = _head_dim(config, num_heads), read_windows(config, family, num_layers)
    rope, other_rope, other_rope_layers = read_rotations(config, family, head_dim, windows)
    width = family.experts.dense_size if family.experts else "intermediate_size"
    read = check_shapes(
        ModelConfig(
            family=name,
            vocab_size=integer(config, "vocab_size"),
            hidden_size=integer(config, "hidden_size"),
            intermediate_size=integer(config, width),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=integer(config, "num_key_value_heads") if has_kv_heads else num_heads,
            head_dim=head_dim,
            rms_norm_eps=number(config, "layer_norm_eps" if family.is_layer_norm else "rms_norm_eps"),
            max_position=_max_position(config, rope),
            rope=rope,
            sliding_windows=windows,
            attention_chunks=read_chunks(config, family, other_rope_layers, num_layers),
            qkv_bias=flag(config, family.qkv_bias),
            output_bias=flag(config, family.output_bias),
            mlp_bias=flag(config, family.mlp_bias),
            qk_norm=family.qk_norm if flag(config, family.qk_norm_key or True) else "none",
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            eos_token_ids=_eos_token_ids(config, generation_config),
            attention_sinks=family.attention_sinks,
            norm="layer" if family.is_layer_norm else "rms",
            norm_places=family.norm_places,
            other_rope=other_rope,
            other_rope_layers=other_rope_layers,
        )
    )
    read = with_latent(read, config) if family.is_latent else with_scales(read, config, family)
    read = with_experts(read, config, family)
    read = _gemma(read, config) if family.is_gemma else read
    read = replace(read, own_feed_forward=family.own_feed_forward)
    return check_shapes(family.finish(read, config)) if family.finish else read
