"""Tensors of a GGUF file under Hugging Face's keys. Used by `checkpoint.py`, engine and worker processes."""

import torch
from torch import Tensor

from model_runtime.config import ModelConfig
from model_runtime.weights.dequantize import dequantize, plain_dtype
from model_runtime.weights.gguf_file import GgufFile, GgufTensor

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_key(name: str) -> str:
    """Hugging Face's key for a tensor of a GGUF file, or the name itself when the table does not know it."""
    stem, _, ending = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{ending}"
    block, _, rest = stem.partition(".")
    layer, _, inner = rest.partition(".")
    if block == "blk" and layer.isdecimal() and inner in _INNER:
        return f"model.layers.{layer}.{_INNER[inner]}.{ending}"
    return name


def _unpermute(rows: Tensor, num_heads: int) -> None:
    """In place [H D, ...]: llama files order the rows of a head for rotating (x[2i], x[2i + 1]); undo that."""
    pairs = rows.view(num_heads, -1, 2, rows[0].numel())
    rows.copy_(pairs.transpose(1, 2).reshape(rows.shape))


class GgufSource:
    """The file stays mapped for as long as this object lives; tensors are expanded as they are read."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        """`config` is what `read_gguf_config` made of the same file."""
        self._tensors: dict[str, GgufTensor] = {hf_key(name): tensor for name, tensor in file.tensors.items()}
        size = file.path.stat().st_size
        self._bytes = torch.from_file(str(file.path), shared=False, size=size, dtype=torch.uint8)
        self._permuted_heads: dict[str, int] = {}
        if file.metadata["general.architecture"] == "llama":
            self._permuted_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def keys(self) -> frozenset[str]:
        """As in TensorSource."""
        return frozenset(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """As in TensorSource."""
        return self._tensors[key].shape

    def dtype(self, key: str) -> torch.dtype:
        """As in TensorSource."""
        return plain_dtype(self._tensors[key].type_id)

    def read_into(self, key: str, target: Tensor) -> None:
        """As in TensorSource. Raises CheckpointError for a format that cannot be expanded."""
        tensor = self._tensors[key]
        dequantize(self._bytes[tensor.offset : tensor.offset + tensor.num_bytes], tensor.type_id, target)
        projection = key.split(".")[-2]
        if projection in self._permuted_heads:
            _unpermute(target, self._permuted_heads[projection])
