"""What the metadata of a GGUF file says of rotary positions and of windows, as config.json's keys. Used by
`gguf_config.py`, engine and worker processes; torch-free.
"""

from model_runtime.hf.rope import LAYER_TYPES, yarn_attention_factor
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_metadata import GgufMetadata

DIVISORS = "rope_freqs.weight"
"""Of frequencies: the scaling of Llama 3."""
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""The same of LongRoPE."""
ROPE_TENSORS = frozenset((DIVISORS, LONG, SHORT))
_FULL, _SLIDING = LAYER_TYPES
Json = dict[str, object]


def read_divisors(metadata: GgufMetadata, pairs: int) -> tuple[float, ...]:
    """One for each rotated pair, or none."""
    return tuple(metadata.floats(DIVISORS, pairs)) if DIVISORS in metadata.file.tensors else ()


def read_rope(metadata: GgufMetadata, head_dim: int, can_be_partial: bool) -> Json:
    """The keys that say how positions turn a head of so many channels, a part of them if so said."""
    rotary_dim = metadata.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not can_be_partial:
        raise metadata.refusal("rotating a part of a head")
    if metadata.has("rope.dimension_sections"):
        raise metadata.refusal("rotating by rows and columns of images")
    theta, scaling = metadata.number("rope.freq_base", 10000.0), _scaling(metadata, rotary_dim // 2)
    original = "original_max_position_embeddings"
    return {
        "rope_theta": theta,
        "rope_local_base_freq": theta,
        "rope_scaling": scaling,
        "partial_rotary_factor": rotary_dim / head_dim,
        **({original: scaling[original]} if original in scaling else {}),
    }


def _scaling(metadata: GgufMetadata, pairs: int) -> Json:
    tensors = metadata.file.tensors
    kind = metadata.file.metadata.get(f"{metadata.prefix}.rope.scaling.type", "none")
    if LONG in tensors and SHORT in tensors:
        return {
            "rope_type": "longrope",
            "long_factor": metadata.floats(LONG, pairs),
            "short_factor": metadata.floats(SHORT, pairs),
            "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
            "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
        }
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        name = metadata.file.path.name
        raise CheckpointError(f"{name}: rope scaling {kind!r} is not supported; none, linear and yarn are")
    factor = metadata.number("rope.scaling.factor")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" else _yarn(metadata, factor)


def _yarn(metadata: GgufMetadata, factor: float) -> Json:
    found: Json = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if metadata.has("rope.scaling.yarn_log_multiplier"):
        mscale = 10 * metadata.number("rope.scaling.yarn_log_multiplier")
        return found | {"mscale": mscale, "mscale_all_dim": mscale}  # DeepSeek's, which are equal in all of its models
    usual = metadata.number("rope.scaling.attn_factor", 1.0) * yarn_attention_factor(factor)
    return found | {"attention_factor": metadata.number("rope.scaling.yarn_attn_factor", usual)}


def read_layer_windows(metadata: GgufMetadata, num_layers: int, window: int) -> Json:
    """The keys that say which layers have a window. `window` is that of files that do not say, 0 for none; where they
    do not say in which layers, the family's default holds."""
    window = metadata.count("attention.sliding_window", window)
    if window == 0:
        return {"sliding_window": None, "layer_types": [_FULL] * num_layers}
    key = "attention.sliding_window_pattern"
    pattern = metadata.file.metadata.get(f"{metadata.prefix}.{key}")
    if pattern is None:
        return {"sliding_window": window}
    if type(pattern) is int and pattern > 0:
        return {"sliding_window": window, "sliding_window_pattern": pattern}
    if not isinstance(pattern, list) or len(pattern) < num_layers:
        raise metadata.error(key, f"must be a number or say of {num_layers} layers whether they have a window", pattern)
    return {"sliding_window": window, "layer_types": [_SLIDING if has else _FULL for has in pattern[:num_layers]]}
