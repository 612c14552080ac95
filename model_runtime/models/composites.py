"""What a vision-language model's config.json adds to that of its language model: a table, not code.

Read by `hf/config.py`, engine and worker processes; does not import torch. The image side has its own in `vision/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """One `model_type` whose config.json has a language model's under text_config, and an image tower's beside it."""

    text: str
    """Key of FAMILIES: the model_type of a text_config that names none."""
    is_fixed: bool = False
    """The language model is `text` whatever its text_config calls it."""
    is_flat: bool = False
    """Old files have no text_config, and the language model's keys beside the others."""
    tied: bool = False
    """tie_word_embeddings of a file that does not say."""
    tied_inside: bool = False
    """tie_word_embeddings also counts where only the text_config has it."""
    is_gemma: bool = False
    """Gemma 3: images of `mm_tokens_per_image` embeddings, which attend in both directions."""
    deepstack: bool = False
    """The tower's `deepstack_visual_indexes` say how many layers get features of their own."""

    text_only: bool = False
    """The image tower is not supported: its tensors are left out, and the model takes no images."""


COMPOSITES: Mapping[str, Composite] = {
    "gemma3": Composite(text="gemma3_text", is_fixed=True, tied=True, is_gemma=True),
    "idefics3": Composite(text="llama"),
    "internvl": Composite(text="qwen2", tied=True),
    "kimi_k3": Composite(text="kimi_k3_text", is_fixed=True, text_only=True),
    "kimi_k25": Composite(text="deepseek_v3", tied=True),
    "kimi_vl": Composite(text="deepseek_v3"),
    "llama4": Composite(text="llama4_text", is_fixed=True, text_only=True),
    "llava": Composite(text="llama", tied_inside=True),
    "llava_next": Composite(text="llama"),
    "llava_onevision": Composite(text="qwen2", tied_inside=True),
    "mistral3": Composite(text="mistral", tied=True),
    "qwen2_5_vl": Composite(text="qwen2_vl_text", is_fixed=True, is_flat=True, tied_inside=True),
    "qwen2_vl": Composite(text="qwen2_vl_text", is_fixed=True, is_flat=True, tied_inside=True),
    "qwen3_5": Composite(text="qwen3_5_text", is_fixed=True),
    "qwen3_5_moe": Composite(text="qwen3_5_moe_text", is_fixed=True),
    "qwen3_vl": Composite(text="qwen3_vl_text", is_fixed=True, deepstack=True),
    "qwen3_vl_moe": Composite(text="qwen3_vl_moe_text", is_fixed=True, deepstack=True),
    "smolvlm": Composite(text="llama"),
}
