"""From a Hugging Face config.json to the `VisionTowerConfig` of its image side: one reader per family.

Called by the checkpoint loader in the engine process; imports no torch. A family without a reader is refused by name.
"""

from collections.abc import Callable, Mapping

from vision.encoder import fixed_readers, kimi_reader, packed_readers
from vision.encoder.hf_json import Json, Section
from vision.tower_config import VisionConfigError, VisionTowerConfig

Reader = Callable[[Section, int], VisionTowerConfig]


def _llava(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """LLaVA's model_type covers three towers."""
    towers = ("clip_vision_model", "siglip_vision_model", "pixtral")
    if config.section("vision_config", {}).choice("model_type", towers) == "pixtral":
        return packed_readers.llava_pixtral(config, text_hidden_size)
    return fixed_readers.llava(config, text_hidden_size)


READERS: Mapping[str, tuple[Json, Reader]] = {
    "llava": (fixed_readers.LLAVA_DEFAULTS, _llava),
    "llava_next": (fixed_readers.LLAVA_DEFAULTS, fixed_readers.llava_next),
    "llava_onevision": (fixed_readers.ONEVISION_DEFAULTS, fixed_readers.onevision),
    "idefics3": ({"scale_factor": 2}, fixed_readers.idefics3),
    "smolvlm": ({"scale_factor": 2}, fixed_readers.smolvlm),
    "internvl": (fixed_readers.INTERNVL_PROJECTOR_DEFAULTS, fixed_readers.internvl),
    "gemma3": ({"mm_tokens_per_image": 256}, fixed_readers.gemma3),
    "qwen2_vl": ({}, packed_readers.qwen2_vl),
    "qwen2_5_vl": ({}, packed_readers.qwen2_5_vl),
    "qwen3_5": ({}, packed_readers.qwen3_5),
    "qwen3_5_moe": ({}, packed_readers.qwen3_5),
    "qwen3_vl": ({}, packed_readers.qwen3_vl),
    "qwen3_vl_moe": ({}, packed_readers.qwen3_vl),
    "kimi_k25": (kimi_reader.PROJECTOR_DEFAULTS, kimi_reader.kimi_k25),
    "kimi_vl": (kimi_reader.PROJECTOR_DEFAULTS, kimi_reader.kimi_vl),
    "mistral3": (packed_readers.MISTRAL3_DEFAULTS, packed_readers.mistral3),
}
"""By model_type: what a config.json may leave out beside its vision_config, and the reader."""


def read_vision(config: Json, text_hidden_size: int) -> VisionTowerConfig:
    """The image side of a parsed config.json; text_hidden_size is the language model's width.

    Raises VisionConfigError for a family or a setting that is not supported.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in READERS:
        raise VisionConfigError(f"config.json: no image tower for model_type {family!r}; {', '.join(READERS)} have one")
    defaults, reader = READERS[family]
    return reader(Section(config, defaults), text_hidden_size)
