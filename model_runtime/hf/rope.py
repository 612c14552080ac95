"""Reads what a config.json says about rotary positions, in the spellings of transformers 5 and of older files.

Called by `hf/layers.py`, `hf/deepseek.py` and the reader of GGUF files, engine and worker processes; does not import
torch.
"""

import math
from dataclasses import replace

from model_runtime.architecture import QueryGrowth, RopeConfig
from model_runtime.hf.values import Json, fail, flag, integer, mapping, number, value_of
from model_runtime.models.family import Family
from model_runtime.weights.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")
EXTENDED = ("llama3", "longrope", "yarn")
"""Those that say how long sequences were before, under a key that wins where it stands beside them."""
ORIGINAL = "original_max_position_embeddings"
LAYER_TYPES = ("full_attention", "sliding_attention")


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """What YaRN (arXiv 2309.00071, eq. 22) multiplies cosines and sines with; a ratio if DeepSeek's mscales are set."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def rope_parameters(config: Json) -> dict[str, object]:
    """One flat object with `rope_type` and `rope_theta`, from either spelling; of both, the older one counts."""
    found = {"rope_theta": config["rope_theta"]}
    found |= mapping(config, "rope_scaling") or mapping(config, "rope_parameters")
    kind = found.get("rope_type", found.get("type", "default"))
    # older files of Qwen2-VL call the kind mrope; what makes it that are the sections
    found["rope_type"] = "default" if kind == "mrope" and "mrope_section" in found else kind
    if kind in ("su", "yarn") and "short_factor" in found:  # Phi-3's first names of the kind
        found["rope_type"] = "longrope"
    if config.get(ORIGINAL) is not None and found["rope_type"] in EXTENDED:
        found[ORIGINAL] = config[ORIGINAL]
    return found


def _rotary_dim(config: Json, parameters: dict[str, object], family: Family, head_dim: int) -> int:
    """Channels of a head that are rotated."""
    key = "partial_rotary_factor"
    of_channels = integer(config, "rotary_dim") / head_dim if "rotary_dim" in config else 1.0
    factors = {key: config.get(key, of_channels)} | parameters
    if not family.partial_rotary:
        if factors[key] != 1.0:
            fail(key, factors[key], "1: this model_type rotates whole heads")
        return head_dim
    rotary_dim = int(head_dim * number(factors, key))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        fail(key, factors[key], f"an even number of the {head_dim} channels of a head")
    return rotary_dim


def _by_layer_type(config: Json, layer_type: str, theta_key: str, scaling: Json) -> Json:
    """The keys of one kind of layer where they differ: a nested rope_parameters, keys apart (Gemma 3), or both."""
    nested = mapping(config, "rope_parameters")
    if nested and not nested.keys() <= set(LAYER_TYPES):
        fail("rope_parameters", dict(nested), f"an object with {' and '.join(LAYER_TYPES)}")
    return {
        **config,
        "rope_theta": config[theta_key],
        ORIGINAL: None,
        "rope_scaling": None,
        "rope_parameters": {**mapping({layer_type: None, **nested}, layer_type), **scaling},
    }


def read_ropes(config: Json, family: Family, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Of a config with all defaults filled in: the rope, and that of layers with a sliding window if it is another.

    Raises CheckpointError naming the key that is wrong or not supported.
    """
    if not family.local_rope:
        return _rope(config, family, head_dim), None
    whole = _by_layer_type(config, "full_attention", "rope_theta", mapping(config, "rope_scaling"))
    local = _by_layer_type(config, "sliding_attention", "rope_local_base_freq", {})
    return _rope(whole, family, head_dim), _rope(local, family, head_dim)


def _rope(config: Json, family: Family, head_dim: int) -> RopeConfig:
    parameters = rope_parameters(config)
    plain = RopeConfig(
        theta=number(parameters, "rope_theta"),
        rotary_dim=_rotary_dim(config, parameters, family, head_dim),
        interleaved=family.interleaved_rope,
    )
    rope = _scaled(config, parameters, plain)
    if family.growth == "by_rope" and parameters.get("llama_4_scaling_beta") is not None:
        length = integer(parameters, ORIGINAL)
        rope = replace(rope, growth=QueryGrowth(rate=number(parameters, "llama_4_scaling_beta"), length=length))
    if family.qk_norm == "rotated" and rope.attention_factor != 1.0:
        fail("rope_parameters", parameters, "of a kind that leaves the length of queries and keys as it is")
    if family.mrope_sections is None:
        return rope
    sections = parameters.get("mrope_section", list(family.mrope_sections))
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(length) is int for length in sections):
        fail("mrope_section", sections, "three integers")
    if min(sections) < 0 or 2 * sum(sections) != rope.rotary_dim:
        fail("mrope_section", sections, f"three lengths that sum to half of the {rope.rotary_dim} rotated channels")
    return replace(rope, mrope_sections=tuple(sections), mrope_interleaved=family.mrope_interleaved)


def _scaled(config: Json, parameters: dict[str, object], plain: RopeConfig) -> RopeConfig:
    kind = parameters["rope_type"]
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported; {', '.join(ROPE_TYPES)} are")
    if kind in ("default", "dynamic"):
        # dynamic differs from default only beyond max_position_embeddings, which is where this server's limit lies
        return plain
    if kind == "longrope":
        return _longrope(config, parameters, plain)
    factor = number(parameters, "factor")
    if kind == "linear":
        return replace(plain, kind="linear", factor=factor)
    original = integer({ORIGINAL: value_of(config, "max_position_embeddings")} | parameters, ORIGINAL)
    if kind == "llama3":
        return replace(
            plain,
            kind="llama3",
            factor=factor,
            low_freq_factor=number(parameters, "low_freq_factor"),
            high_freq_factor=number(parameters, "high_freq_factor"),
            original_max_position=original,
        )
    return _yarn(parameters, replace(plain, kind="yarn", factor=factor, original_max_position=original))


def _longrope(config: Json, parameters: dict[str, object], rope: RopeConfig) -> RopeConfig:
    """Cosines and sines grow with the ratio of the lengths, whichever of the two lists divides the frequencies."""
    for key in ("short_mscale", "long_mscale"):
        if key in parameters:
            fail(key, parameters[key], "absent: other factors of cosines and sines are not supported")
    longest = integer(config, "max_position_embeddings")
    original = integer({ORIGINAL: longest} | parameters, ORIGINAL)
    if original == 1:
        fail(ORIGINAL, original, "at least 2")
    given = {name: value for name, value in parameters.items() if value is not None}
    factor = number({"factor": longest / original} | given, "factor")
    growth = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(
        rope,
        divisors=_divisors(parameters, "short_factor", rope.rotary_dim // 2),
        long_divisors=_divisors(parameters, "long_factor", rope.rotary_dim // 2),
        original_max_position=original,
        attention_factor=number({"attention_factor": growth} | given, "attention_factor"),
    )


def _divisors(parameters: Json, key: str, count: int) -> tuple[float, ...]:
    values = value_of(parameters, key)
    if not isinstance(values, list) or len(values) != count:
        fail(key, values, f"a list of {count} numbers")
    return tuple(number({key: value}, key) for value in values)


def _yarn(parameters: dict[str, object], rope: RopeConfig) -> RopeConfig:
    given = {key: value for key, value in parameters.items() if value is not None}
    mscales = [number(given, key) if given.get(key) else 0.0 for key in ("mscale", "mscale_all_dim")]
    default = yarn_attention_factor(rope.factor, mscales[0], mscales[1])
    betas = {"beta_fast": 32.0, "beta_slow": 1.0} | given
    return replace(
        rope,
        beta_fast=number(betas, "beta_fast"),
        beta_slow=number(betas, "beta_slow"),
        whole_pairs=flag({"truncate": True} | given, "truncate"),
        attention_factor=number({"attention_factor": default} | given, "attention_factor"),
    )
