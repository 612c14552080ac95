"""Tensors of a GGUF file under Hugging Face's keys. Used by `checkpoint.py`, engine and worker processes."""

import torch
from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.quantized import QuantizedFormat, QuantizedMatrix
from model_runtime.weights.dequantize import BLOCK_FORMATS, dequantize, plain_dtype
from model_runtime.weights.gguf_file import GGML_TYPES, GgufFile, GgufTensor
from model_runtime.weights.source import Index

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


def _unpermuted(rows: Tensor, num_heads: int) -> Tensor:
    """[H D, ...]: llama files order the rows of a head for rotating (x[2i], x[2i + 1]); undo that."""
    pairs = rows.view(num_heads, -1, 2, rows[0].numel())
    return pairs.transpose(1, 2).reshape(rows.shape)


def _are_blocks(tensor: GgufTensor, columns: slice) -> bool:
    """Whether columns begin and end where blocks of numbers do."""
    elements = GGML_TYPES[tensor.type_id].elements
    return bool(columns.start % elements == 0 and columns.stop % elements == 0)


def _block_bytes(tensor: GgufTensor, columns: slice) -> slice:
    """Where the blocks of some columns are among the bytes of a row."""
    stored = GGML_TYPES[tensor.type_id]
    assert _are_blocks(tensor, columns), f"{columns} are not blocks of {stored.elements}"
    return slice(*(end // stored.elements * stored.num_bytes for end in (columns.start, columns.stop)))


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

    def quantized(self, key: str) -> QuantizedFormat | None:
        """As in TensorSource."""
        tensor = self._tensors[key]
        return BLOCK_FORMATS.get(GGML_TYPES[tensor.type_id].name) if len(tensor.shape) == 2 else None

    def read_quantized(self, key: str, index: Index) -> QuantizedMatrix:
        """As in TensorSource."""
        stored, (_, columns) = self.quantized(key), index
        assert stored is not None, f"{key} holds no blocks of integers"
        data_NR = self._in_order(key, self._rows(key, index[0])[:, _block_bytes(self._tensors[key], columns)])
        return QuantizedMatrix(data_NR=data_NR, format=stored, num_columns=columns.stop - columns.start)

    def read_into(self, key: str, index: Index, target: Tensor) -> None:
        """As in TensorSource. Raises CheckpointError for a format that cannot be expanded."""
        tensor = self._tensors[key]
        if target.dim() == 1:
            whole_N = torch.empty(tensor.shape)
            dequantize(self._raw(tensor), tensor.type_id, whole_N)
            target.copy_(whole_N[index])
        elif _are_blocks(tensor, index[1]):
            raw_NR = self._rows(key, index[0])[:, _block_bytes(tensor, index[1])]
            dequantize(raw_NR.flatten(), tensor.type_id, target)
        else:
            wide_NK = torch.empty(target.shape[0], tensor.shape[1])
            dequantize(self._rows(key, index[0]).flatten(), tensor.type_id, wide_NK)
            target.copy_(wide_NK[:, index[1]])
        target.copy_(self._in_order(key, target))

    def _raw(self, tensor: GgufTensor) -> Tensor:
        return self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]

    def _rows(self, key: str, rows: slice) -> Tensor:
        """[N, R]: the bytes of some rows of a matrix."""
        tensor = self._tensors[key]
        return self._raw(tensor).view(tensor.shape[0], -1)[rows]

    def _in_order(self, key: str, rows: Tensor) -> Tensor:
        """Rows of whole heads as they are rotated here."""
        num_heads = self._permuted_heads.get(key.split(".")[-2], 0)
        if not num_heads:
            return rows
        in_head = self._tensors[key].shape[0] // num_heads
        assert rows.shape[0] % in_head == 0, f"{rows.shape[0]} rows are not heads of {in_head}"
        return _unpermuted(rows, rows.shape[0] // in_head)
