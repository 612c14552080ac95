"""From a path to a decoder that is ready to run: a Hugging Face folder or a GGUF file. Called by the executor, engine
and worker processes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from model_runtime.config import ModelConfig
from model_runtime.hf_config import read_hf_config
from model_runtime.models.decoder import TIED_HEAD_KEY, Decoder, decoder_table
from model_runtime.ops.registry import Ops
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_config import ROPE_DIVISORS, read_gguf_config
from model_runtime.weights.gguf_file import read_gguf
from model_runtime.weights.gguf_source import GgufSource
from model_runtime.weights.load import load_parameters
from model_runtime.weights.safetensors_source import SafetensorsSource, read_json
from model_runtime.weights.source import TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder and the facts about it."""

    config: ModelConfig
    decoder: Decoder
    weight_bytes: int
    description: str
    """For people: family, parameters, storage."""


def _open(path: Path) -> tuple[ModelConfig, TensorSource]:
    if path.is_dir():
        generation = path / "generation_config.json"
        config = read_hf_config(
            read_json(path / "config.json"), read_json(generation) if generation.is_file() else None
        )
        return config, SafetensorsSource(path)
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path} is neither a folder with a Hugging Face checkpoint nor a .gguf file")
    file = read_gguf(path)
    config = read_gguf_config(file)
    return config, GgufSource(file, config)


def _ignorable(config: ModelConfig, key: str) -> bool:
    """Tensors that carry nothing: frequencies that the config determines, and a copy of the tied embedding."""
    is_tied_head = key == TIED_HEAD_KEY and config.tie_word_embeddings
    return is_tied_head or key.endswith("rotary_emb.inv_freq") or key == ROPE_DIVISORS


def _every_position(config: ModelConfig, weight_bytes: int) -> int:
    return config.max_position


def load_model(
    path: Path,
    ops: Ops,
    device: torch.device,
    progress: Callable[[float], None],
    length: Callable[[ModelConfig, int], int] = _every_position,
) -> LoadedModel:
    """Load a checkpoint. `progress` is told the finished share of the weights, 0 to 1. `length` is given the
    architecture and the bytes of the weights, and answers how many positions the decoder needs tables for.

    Raises CheckpointError for a checkpoint that is missing, damaged, inconsistent or not supported.
    """
    config, source = _open(path)
    table = decoder_table(config)
    parameters = load_parameters(table, source, ops, device, lambda key: _ignorable(config, key), progress)
    count = sum(parameter.rows * (parameter.columns or 1) for parameter in table)
    return LoadedModel(
        config=config,
        decoder=Decoder(config, parameters, ops, device, length(config, parameters.num_bytes)),
        weight_bytes=parameters.num_bytes,
        description=f"{config.family}, {count / 1e6:.1f} M parameters in {parameters.num_bytes / 2**20:.0f} MiB",
    )
