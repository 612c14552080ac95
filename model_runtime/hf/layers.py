"""Reads what a config.json says of each layer: how far its attention sees, and whether it rotates.

Called by `hf/config.py`, engine and worker processes; does not import torch.
"""

from dataclasses import replace

from model_runtime.architecture import QueryGrowth, RopeConfig
from model_runtime.hf.rope import LAYER_TYPES, read_ropes
from model_runtime.hf.values import Json, fail, flag, integer, number, value_of
from model_runtime.models.family import Family

UNROTATED = RopeConfig(theta=1.0, rotary_dim=0)


def read_windows(config: Json, family: Family, num_layers: int) -> tuple[int, ...]:
    """Per layer the number of keys in sight, 0 for all. Raises CheckpointError naming the key that is wrong."""
    has_types = config["layer_types"] is not None
    if family.windows == "by_type":
        return _by_type(config, num_layers) if has_types else _by_pattern(config, num_layers)
    if family.windows == "none" or config["sliding_window"] is None:
        return (0,) * num_layers
    if family.windows in ("all_or_by_type", "by_type_or_unrotated") and has_types:
        return _by_type(config, num_layers)
    window = integer(config, "sliding_window")
    if family.windows in ("all_layers", "all_or_by_type"):
        return (window,) * num_layers
    if not flag(config, "use_sliding_window"):
        return (0,) * num_layers
    if family.windows == "by_type_or_unrotated":
        return tuple(window if unrotated else 0 for unrotated in _unrotated_layers(config, family, (0,) * num_layers))
    if has_types:
        return _by_type(config, num_layers)
    first = value_of(config, "max_window_layers")
    if not isinstance(first, int) or first < 0:
        fail("max_window_layers", first, "an integer from 0")
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _by_pattern(config: Json, num_layers: int) -> tuple[int, ...]:
    window, pattern = integer(config, "sliding_window"), integer(config, "sliding_window_pattern")
    return tuple(window if (layer + 1) % pattern else 0 for layer in range(num_layers))


def _by_type(config: Json, num_layers: int) -> tuple[int, ...]:
    layer_types = config["layer_types"]
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or any(layer_type not in LAYER_TYPES for layer_type in layer_types)
    ):
        fail("layer_types", layer_types, f"{num_layers} of {', '.join(LAYER_TYPES)}")
    return tuple(integer(config, "sliding_window") if name == "sliding_attention" else 0 for name in layer_types)


def read_chunks(config: Json, family: Family, unrotated: tuple[bool, ...], num_layers: int) -> tuple[int, ...]:
    """Per layer the length of the chunks that it attends within, 0 for all; empty where the family has none."""
    if not family.chunks or config["attention_chunk_size"] is None:
        return ()
    size, types = integer(config, "attention_chunk_size"), config["layer_types"]
    if types is None:
        return tuple(size if not any(unrotated) or not unrotated[layer] else 0 for layer in range(num_layers))
    known = ("chunked_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(name not in known for name in types):
        fail("layer_types", types, f"{num_layers} of {', '.join(known)}")
    return tuple(size if name == "chunked_attention" else 0 for name in types)


def read_rotations(
    config: Json, family: Family, head_dim: int, windows: tuple[int, ...]
) -> tuple[RopeConfig, RopeConfig | None, tuple[bool, ...]]:
    """(the rope, that of some layers if it is another, which layers those are). Raises CheckpointError naming the key
    that is wrong or not supported."""
    rope, local = read_ropes(config, family, head_dim)
    if local is not None:
        return rope, local, tuple(window > 0 for window in windows)
    layers = _unrotated_layers(config, family, windows)
    if not any(layers):
        return rope, None, ()
    growth = _growth(config) if family.growth == "unrotated_layers" else None
    return rope, replace(UNROTATED, growth=growth), layers


def _growth(config: Json) -> QueryGrowth | None:
    """Llama 4's; older files have a number for true."""
    tuned = value_of(config, "attn_temperature_tuning")
    if not isinstance(tuned, int):
        fail("attn_temperature_tuning", tuned, "true or false")
    if not tuned:
        return None
    return QueryGrowth(rate=number(config, "attn_scale"), length=integer(config, "floor_scale"), offset=1)


def _unrotated_layers(config: Json, family: Family, windows: tuple[int, ...]) -> tuple[bool, ...]:
    if family.unrotated == "none":
        return ()
    if family.unrotated == "whole_layers_beside_windows" and config["sliding_window"] is None:
        return ()
    if family.unrotated != "listed":
        return tuple(window == 0 for window in windows)
    rotated = value_of(config, "no_rope_layers")
    if rotated is None or rotated == []:
        interval = integer(config, "no_rope_layer_interval")
        return tuple((layer + 1) % interval == 0 for layer in range(len(windows)))
    if not isinstance(rotated, list) or len(rotated) < len(windows) or any(value not in (0, 1) for value in rotated):
        fail("no_rope_layers", rotated, f"a list of {len(windows)} numbers 0 or 1")
    return tuple(value == 0 for value in rotated[: len(windows)])
