"""Reads a GGUF file's metadata into a `ModelConfig`. Called by `opening.py`, engine and worker processes;
torch-free.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and those of `gguf_families.py`. They are put as
config.json's, whose reader knows the family. Biases and a separate output matrix are not in the metadata; whether their
tensors are in the file tells.
"""

from dataclasses import replace

from model_runtime.architecture import ModelConfig
from model_runtime.hf.config import read_hf_config
from model_runtime.models.family import Family
from model_runtime.models.packages import family_named
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_families import GgufFamily, gguf_family
from model_runtime.weights.gguf_file import GgufFile
from model_runtime.weights.gguf_metadata import GgufMetadata
from model_runtime.weights.gguf_rope import read_divisors, read_layer_windows, read_rope

Json = dict[str, object]


def _eos_token_ids(file: GgufFile, ends: tuple[str, ...]) -> list[int]:
    """End of sequence and, where a chat model names it separately, end of turn; and tokens that are spelled so."""
    values = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    tokens = file.metadata.get("tokenizer.ggml.tokens") if ends else None
    spelled = [index for index, token in enumerate(tokens) if token in ends] if isinstance(tokens, list) else []
    return list(dict.fromkeys([*(value for value in values if isinstance(value, int)), *spelled]))


def _head_dim(metadata: GgufMetadata) -> int:
    size, num_heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", size // num_heads)
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise metadata.refusal("values of another length than keys")
    return head_dim


def _heads(metadata: GgufMetadata, family: Family) -> Json:
    """How many there are, their channels, and how these are rotated."""
    num_heads = metadata.integer("attention.head_count")
    if family.is_latent:
        return {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, **_latent(metadata)}
    head_dim = _head_dim(metadata)
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        **read_rope(metadata, head_dim, family.partial_rotary),
    }


def _latent(metadata: GgufMetadata) -> Json:
    """Files say the lengths of heads as if latents were keys, and beside these the true ones; older ones only those."""
    rotated = metadata.integer("rope.dimension_count")
    key = "attention.key_length_mla" if metadata.has("attention.key_length_mla") else "attention.key_length"
    value = "attention.value_length_mla" if metadata.has("attention.value_length_mla") else "attention.value_length"
    has_rank = metadata.has("attention.q_lora_rank")
    return {
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": metadata.integer("attention.q_lora_rank") if has_rank else None,
        "qk_nope_head_dim": metadata.integer(key) - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": metadata.integer(value),
        **read_rope(metadata, rotated, can_be_partial=False),
    }


def num_main_layers(metadata: GgufMetadata) -> int:
    """Without layers for drafts behind them."""
    return metadata.integer("block_count") - metadata.count("nextn_predict_layers", 0)


def _config_json(file: GgufFile, gguf: GgufFamily, metadata: GgufMetadata) -> Json:
    """What config.json would say."""
    family, num_layers = family_named(gguf.family), num_main_layers(metadata)
    config: Json = {
        "model_type": gguf.family,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number(gguf.norm_eps),
        "layer_norm_eps": metadata.number(gguf.norm_eps),
        "eos_token_id": _eos_token_ids(file, gguf.ends),
        **_heads(metadata, family),
        **(read_layer_windows(metadata, num_layers, gguf.window) if family.windows == "by_type" else {}),
        **gguf.fixed,
    }
    if gguf.layers_of_wide_heads:
        share = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
        config["query_pre_attn_scalar"] = share if num_layers == gguf.layers_of_wide_heads else config["head_dim"]
    config |= {key: metadata.count(name) for name, key in gguf.integers.items()}
    config |= {key: metadata.number(name) for name, key in gguf.numbers.items() if metadata.has(name)}
    config |= {key: metadata.flag(name) for name, key in gguf.flags.items() if metadata.has(name)}
    return config | {key: f"blk.0.{name}" in file.tensors for name, key in gguf.tensors.items()}


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The architecture that the metadata describes. Raises CheckpointError naming what is wrong or not supported."""
    gguf, tensors = gguf_family(file), file.tensors
    metadata = GgufMetadata(file, str(file.metadata["general.architecture"]))
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{file.path.name}: tensor token_embd.weight is missing")
    if "expert_count" not in gguf.integers and metadata.count("expert_count", 0):
        raise metadata.refusal(f"a mixture of experts in {metadata.prefix}")
    read = read_hf_config(_config_json(file, gguf, metadata), None)
    window = metadata.count("attention.sliding_window", 0)
    if window and family_named(gguf.family).windows != "by_type":
        read = replace(read, sliding_windows=(window,) * read.num_layers)
    rope = replace(read.rope, whole_pairs=gguf.whole_pairs)
    if divisors := read_divisors(metadata, rope.rotary_dim // 2):
        rope = replace(rope, divisors=divisors)
    return replace(
        read,
        max_position=metadata.integer("context_length"),
        rope=rope,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
    )
