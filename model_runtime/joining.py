"""An image side from one folder for the language model of another place: a LLaVA checkpoint without its language model,
with an adapter or without, beside a model of text. Called by `opening.py`, engine and worker processes.
"""

from pathlib import Path

from model_runtime.architecture import ModelConfig
from model_runtime.hf.config import read_hf_config
from model_runtime.image_side import ImageSide, read_image_side
from model_runtime.models.composites import COMPOSITES
from model_runtime.weights.adapter import has_adapter, with_adapter
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.json_file import read_json
from model_runtime.weights.safetensors_source import read_safetensors
from model_runtime.weights.sides import split_sides
from model_runtime.weights.source import TensorSource

ALIKE = ("hidden_size", "num_layers", "vocab_size")
"""What text_config says of the language model that an image side was made for."""


def with_image_side(
    folder: Path, config: ModelConfig, source: TensorSource
) -> tuple[ModelConfig, TensorSource, ImageSide]:
    """A language model with the adapter of `folder`, if there is one, and the image side there. Raises CheckpointError
    for one that is missing, damaged, not supported, or made for another language model."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no config.json: an image side is a folder with the files of a checkpoint that takes images, "
            "without its language model (files of llama.cpp, *.gguf, are not read)"
        )
    config_json = read_json(folder / "config.json")
    family = config_json.get("model_type")
    if family not in COMPOSITES or COMPOSITES[str(family)].text_only:
        raise CheckpointError(f"{folder} has no image side: model_type {family!r} takes no images here")
    wanted = read_hf_config(config_json, None)
    _check_fits(folder, wanted, config)
    language, image = split_sides(read_safetensors(folder))
    if language:
        raise CheckpointError(f"{folder} holds a language model ({min(language)}): serve it by itself, as MODEL")
    side = read_image_side(folder, config_json, wanted, image)
    if wanted.image_span or wanted.num_deepstack or side.preprocessor.has_mrope:
        raise CheckpointError(
            f"{folder}: {family} needs a language model that was made for its images; as an image side apart it is not "
            "supported, but such as LLaVA's"
        )
    if has_adapter(folder):
        config, source = with_adapter(folder, config, source)
    return config, source, side


def _check_fits(folder: Path, wanted: ModelConfig, config: ModelConfig) -> None:
    for name in ALIKE:
        needed, found = getattr(wanted, name), getattr(config, name)
        if needed != found:
            raise CheckpointError(
                f"{folder} was made for another language model: its text_config has {name} {needed}, the model {found}"
            )
