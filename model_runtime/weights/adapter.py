"""An adapter beside a checkpoint, in PEFT's files: what it changes, and its tensors under the keys of weight tables.
Called by `opening.py`, engine and worker processes.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from model_runtime.architecture import Adapter, ModelConfig
from model_runtime.hf.values import LARGEST
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.json_file import read_json
from model_runtime.weights.safetensors_source import read_tensors
from model_runtime.weights.sides import language_key
from model_runtime.weights.source import TensorSource

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the keys of the model that it adapts."""

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
"""That may be changed."""

WITHOUT_NUMBERS = frozenset(
    {
        *("base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version", "auto_mapping"),
        *("lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "runtime_config"),
        *("megatron_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    }
)
"""Keys of a config that say how an adapter was trained."""


def has_adapter(folder: Path) -> bool:
    """Whether there is one beside a checkpoint, or a file of one: with half of it no answer would be right."""
    return any(os.path.lexists(folder / name) for name in (CONFIG, TENSORS))


def with_adapter(folder: Path, config: ModelConfig, source: TensorSource) -> tuple[ModelConfig, TensorSource]:
    """A language model with its adapter. Raises CheckpointError for one that is damaged or not supported."""
    if config.latent is not None or config.delta is not None or config.attention_gate:
        raise CheckpointError(f"{CONFIG}: adapters of {config.family} are not supported, but of plain attention")
    adapter = read_adapter(read_json(folder / CONFIG))
    tensors = {language_key(key.removeprefix(PREFIX)): each for key, each in read_tensors(folder / TENSORS).items()}
    if twice := tensors.keys() & source.keys():
        raise CheckpointError(f"{TENSORS} holds {min(twice)}, which the model has: merge the adapter instead")
    return replace(config, adapter=adapter), {**source, **tensors}


def _number(found: Mapping[str, object], key: str) -> float:
    """A positive number."""
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise CheckpointError(f"{CONFIG}: {key} must be a positive number, not {value!r}")
    return value


def read_adapter(found: Mapping[str, object]) -> Adapter:
    """What a config says. Raises CheckpointError that names the key which is wrong or not supported."""
    kind, names, rank = found.get("peft_type"), found.get("target_modules"), _number(found, "r")
    if kind != "LORA":
        raise CheckpointError(f"{CONFIG}: peft_type must be 'LORA', not {kind!r}")
    if not isinstance(names, list) or not names or not all(name in MATRICES for name in names):
        raise CheckpointError(f"{CONFIG}: target_modules must be some of {', '.join(MATRICES)}, not {names!r}")
    if rank != int(rank):
        raise CheckpointError(f"{CONFIG}: r must be an integer, not {rank!r}")
    known = {"peft_type", "target_modules", "r", "lora_alpha"} | WITHOUT_NUMBERS
    for key, value in found.items():
        if key not in known and value not in (None, False, "none", [], {}):
            raise CheckpointError(f"{CONFIG}: {key} is {value!r}, which is not supported: merge the adapter instead")
    matrices = tuple(name for name in MATRICES if name in names)
    return Adapter(rank=int(rank), scale=_number(found, "lora_alpha") / rank, matrices=matrices)
