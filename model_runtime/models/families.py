"""What distinguishes one family of models from another: a table of names and flags, not code.

Read by `hf_config.py` and `weights/gguf_config.py` in the engine process; does not import torch. A new family is a new
row; a block that no row can describe yet is a new field here and in `ModelConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of Hugging Face's config.json. A flag is fixed, or a string: the config key that decides it."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    """Each query and key head is RMS-normalised before it is rotated."""
    windows: Literal["none", "all_layers", "by_layer"] = "none"
    """Which layers attend to `sliding_window` keys only. by_layer: as `layer_types` says, or under
    `use_sliding_window` the layers from `max_window_layers` on."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of config keys that a file may leave out, where they differ from hf_config.COMMON_DEFAULTS."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias", defaults={"eos_token_id": 2}
    ),
    "mistral": Family(windows="all_layers", defaults={"eos_token_id": 2, "sliding_window": 4096}),
    "qwen2": Family(qkv_bias=True, windows="by_layer", defaults={"sliding_window": 4096, "max_window_layers": 28}),
    "qwen3": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        windows="by_layer",
        defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    ),
}
