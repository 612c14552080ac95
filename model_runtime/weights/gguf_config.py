"""Reads a GGUF file's metadata into a `ModelConfig`. Called by `opening.py`, engine and worker processes;
torch-free.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and those of `gguf_families.py`. They are put as
config.json's, whose reader knows the family. Biases and a separate output matrix are not in the metadata; whether their
tensors are in the file tells.
"""

import math
import struct
from dataclasses import replace

from model_runtime.architecture import ModelConfig
from model_runtime.hf_config import read_hf_config
from model_runtime.hf_rope import yarn_attention_factor
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_families import ARCHITECTURES, GgufFamily
from model_runtime.weights.gguf_file import GgufFile

ROPE_DIVISORS = "rope_freqs.weight"
_F32 = 0


class _Metadata:
    """Typed access to the keys under the architecture's prefix. Every method raises CheckpointError."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.prefix = file, architecture

    def has(self, key: str) -> bool:
        """Whether the file says anything."""
        return f"{self.prefix}.{key}" in self.file.metadata

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; float32 values are read as the shortest decimal that they stand for."""
        name = f"{self.prefix}.{key}"
        value = self.file.metadata.get(name, default)
        if value is None:
            raise CheckpointError(f"{self.file.path.name}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"{self.file.path.name}: {name} must be a positive number, not {value!r}")
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.number(key, default)
        if not isinstance(value, int):
            raise CheckpointError(f"{self.file.path.name}: {self.prefix}.{key} must be an integer, not {value!r}")
        return value


def _divisors(file: GgufFile, pairs: int) -> tuple[float, ...]:
    tensor = file.tensors.get(ROPE_DIVISORS)
    if tensor is None:
        return ()
    if tensor.shape != (pairs,) or tensor.type_id != _F32:
        raise CheckpointError(f"{file.path.name}: {ROPE_DIVISORS} must hold {pairs} numbers of type F32")
    with file.path.open("rb") as data:
        data.seek(tensor.offset)
        divisors = struct.unpack(f"<{pairs}f", data.read(tensor.num_bytes))
    if not all(0 < divisor < math.inf for divisor in divisors):
        raise CheckpointError(f"{file.path.name}: {ROPE_DIVISORS} must hold positive numbers")
    return divisors


def _rope(file: GgufFile, metadata: _Metadata, head_dim: int) -> dict[str, object]:
    """What config.json has under rope_scaling."""
    if metadata.integer("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{file.path.name}: rotating a part of a head is not supported")
    kind = file.metadata.get(f"{metadata.prefix}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    factor = metadata.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise CheckpointError(f"{file.path.name}: rope scaling {kind!r} is not supported; none, linear and yarn are")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
        "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0) * yarn_attention_factor(factor),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _eos_token_ids(file: GgufFile, ends: tuple[str, ...]) -> list[int]:
    """End of sequence and, where a chat model names it separately, end of turn; and tokens that are spelled so."""
    values = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    tokens = file.metadata.get("tokenizer.ggml.tokens") if ends else None
    spelled = [index for index, token in enumerate(tokens) if token in ends] if isinstance(tokens, list) else []
    return list(dict.fromkeys([*(value for value in values if isinstance(value, int)), *spelled]))


def _architecture(file: GgufFile) -> str:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path.name}: general.architecture {name!r} is not supported; {', '.join(ARCHITECTURES)} are"
        )
    return name


def _head_dim(metadata: _Metadata) -> int:
    size, num_heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", size // num_heads)
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{metadata.file.path.name}: values of another length than keys are not supported")
    return head_dim


def _config_json(file: GgufFile, family: GgufFamily, metadata: _Metadata) -> dict[str, object]:
    """What config.json would say."""
    num_heads, head_dim = metadata.integer("attention.head_count"), _head_dim(metadata)
    config: dict[str, object] = {
        "model_type": family.family,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope(file, metadata, head_dim),
        "rms_norm_eps": metadata.number(family.norm_eps),
        "layer_norm_eps": metadata.number(family.norm_eps),
        "eos_token_id": _eos_token_ids(file, family.ends),
        **family.fixed,
    }
    config |= {key: metadata.integer(name) for name, key in family.integers.items()}
    return config | {key: metadata.number(name) for name, key in family.numbers.items() if metadata.has(name)}


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The architecture that the metadata describes. Raises CheckpointError naming what is wrong or not supported."""
    architecture, tensors = _architecture(file), file.tensors
    family, metadata = ARCHITECTURES[architecture], _Metadata(file, architecture)
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{file.path.name}: tensor token_embd.weight is missing")
    if metadata.has("expert_count") and "expert_count" not in family.integers:
        raise CheckpointError(f"{file.path.name}: mixtures of experts are not supported in {architecture}")
    read = read_hf_config(_config_json(file, family, metadata), None)
    if metadata.has("attention.sliding_window") and "attention.sliding_window" not in family.integers:
        window = metadata.integer("attention.sliding_window")
        read = replace(read, sliding_windows=(window,) * read.num_layers)
    return replace(
        read,
        max_position=metadata.integer("context_length"),
        rope=replace(read.rope, divisors=_divisors(file, read.head_dim // 2), whole_pairs=family.whole_pairs),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
    )
