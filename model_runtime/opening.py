"""From a path to a checkpoint whose configuration and headers are read and whose weights are not: a Hugging Face
folder, a GGUF file, or, to plan for, a config.json without any weights. Called by `checkpoint.py`, engine and worker
processes, and by `firstlight plan`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from model_runtime.architecture import ModelConfig
from model_runtime.hf.config import read_hf_config
from model_runtime.hf.quantization import read_quantization
from model_runtime.image_side import ImageSide, read_image_side
from model_runtime.joining import with_image_side
from model_runtime.models.composites import COMPOSITES
from model_runtime.models.decoder import EMBEDDING_KEY, TIED_HEAD_KEY, decoder_table
from model_runtime.models.next_token import next_token_prefix, next_token_table
from model_runtime.models.packages import family_named
from model_runtime.weights.adapter import CONFIG as ADAPTER_CONFIG
from model_runtime.weights.adapter import has_adapter, with_adapter
from model_runtime.weights.declared import declared_dtype, declared_text, declared_vision
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_config import read_gguf_config
from model_runtime.weights.gguf_file import read_gguf
from model_runtime.weights.gguf_rope import ROPE_TENSORS
from model_runtime.weights.gguf_source import gguf_tensors
from model_runtime.weights.json_file import read_json, read_json_if_any
from model_runtime.weights.matrices import matrices_of
from model_runtime.weights.safetensors_source import read_safetensors
from model_runtime.weights.sides import split_sides, text_source
from model_runtime.weights.source import TensorSource, equal
from model_runtime.weights.spelling import plain_source
from model_runtime.weights.table import Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint whose configuration is read and whose weights are not."""

    path: Path
    family: str
    """For people."""
    config: ModelConfig
    source: TensorSource
    """Of the decoder, under the keys that weight tables name."""
    side: ImageSide | None = None
    image_folder: Path | None = None
    """Where `side` is from, if it is not from `path`."""
    is_declared: bool = False
    """There is a config.json and no weights; of a mixture, `source` has one expert a layer."""

    def ignores(self, key: str) -> bool:
        """Tensors that carry nothing: frequencies that the config determines, a copy of the tied embedding, and layers
        for drafts."""
        config = self.config
        is_tied_head = key == TIED_HEAD_KEY and config.tie_word_embeddings
        drafts = tuple(f"model.layers.{config.num_layers + index}." for index in range(config.num_draft_layers))
        return is_tied_head or key.endswith("rotary_emb.inv_freq") or key in ROPE_TENSORS or key.startswith(drafts)


def open_checkpoint(path: Path, image_folder: Path | None = None) -> Opened:
    """With the image side of another folder, if there is one. Raises CheckpointError for files that are missing,
    damaged or not supported, or do not belong together."""
    opened = _open_model(path)
    if image_folder is None:
        return opened
    if opened.side is not None:
        raise CheckpointError(f"{path} takes images by itself: leave out {image_folder}")
    config, source, side = with_image_side(image_folder, opened.config, opened.source)
    name = f"{opened.family}, images by {image_folder.resolve().name}"
    return replace(opened, family=name, config=config, source=source, side=side, image_folder=image_folder)


def _open_model(path: Path) -> Opened:
    if path.is_dir():
        return _open_folder(path)
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path} is neither a folder with a Hugging Face checkpoint nor a .gguf file")
    file = read_gguf(path)
    config = read_gguf_config(file)
    source = plain_source(gguf_tensors(file, config), config)
    return Opened(path=path, family=config.family, config=config, source=source)


def _open_folder(path: Path) -> Opened:
    config_json = read_json(path / "config.json")
    config = read_hf_config(config_json, read_json_if_any(path / "generation_config.json"))
    stored = matrices_of(read_safetensors(path), read_quantization(config_json))
    family = str(config_json["model_type"])
    takes_images, name = _takes_images(family), _described(family, config)
    if has_adapter(path) and not takes_images:
        raise CheckpointError(
            f"{ADAPTER_CONFIG}: adapters are for requests with images, and {family} takes none: "
            "merge this one into the model's matrices"
        )
    if family not in COMPOSITES:
        source, may_lack_output = text_source(stored)
        config = _with_own_head(config, source)
        if may_lack_output and not config.tie_word_embeddings:
            config = replace(config, has_output=TIED_HEAD_KEY in source)
        return Opened(path=path, family=name, config=config, source=plain_source(source, config))
    language, image = split_sides(stored)
    side = read_image_side(path, config_json, config, image) if takes_images else None
    config = _with_own_head(config, language)
    source = plain_source(language, config)
    if has_adapter(path):
        config, source = with_adapter(path, config, source)
    return Opened(path=path, family=name, config=config, source=source, side=side)


def _with_own_head(config: ModelConfig, source: TensorSource) -> ModelConfig:
    """Not tied, where the file has an output matrix beside the embedding that is not the same, whatever config.json
    says: as transformers, since many files leave the key out where it means true, or were trained on without it."""
    if not config.tie_word_embeddings or TIED_HEAD_KEY not in source or EMBEDDING_KEY not in source:
        return config
    return replace(config, tie_word_embeddings=equal(source[TIED_HEAD_KEY], source[EMBEDDING_KEY]))


def open_configuration(path: Path) -> Opened:
    """A config.json as if there were weights of the type that it names beside it; of a mixture, those of one expert a
    layer. Nothing can be read of them. Raises CheckpointError for what is not supported."""
    config_json = read_json(path)
    config = read_hf_config(config_json, read_json_if_any(path.with_name("generation_config.json")))
    family, dtype = str(config_json["model_type"]), declared_dtype(config_json)
    table = decoder_table(config, first_expert_only=True)
    renamed = family_named(config.family).renamed
    source = declared_text(table, dtype, read_quantization(config_json), renamed)
    side = None
    if _takes_images(family):
        side = read_image_side(path.parent, config_json, config, {})
        side = replace(side, source=declared_vision(side.tower, dtype))
    name = _described(family, config)
    return Opened(path=path, family=name, config=config, source=source, side=side, is_declared=True)


def _takes_images(family: str) -> bool:
    return family in COMPOSITES and not COMPOSITES[family].text_only


def _described(family: str, config: ModelConfig) -> str:
    """For people: the model_type, and that of the language model in it."""
    return f"{family} ({config.family})" if family in COMPOSITES else family


def next_token_parameters(opened: Opened) -> list[Parameter]:
    """Those of the layer for multi-token prediction behind the last one. Raises CheckpointError where there is none."""
    config, prefix = opened.config, next_token_prefix(opened.config)
    if not config.num_draft_layers or not any(key.startswith(prefix) for key in opened.source):
        raise CheckpointError("the speculation method mtp needs layers for multi-token prediction, and there are none")
    if config.latent is None:
        raise CheckpointError(f"the speculation method mtp is not supported for {config.family}")
    return next_token_table(config)
