"""Tensors of a GGUF file under Hugging Face's keys. Used by `opening.py`, engine and worker processes."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.quantized import QuantizedFormat, QuantizedMatrix
from model_runtime.weights.dequantize import BLOCK_FORMATS, dequantize, plain_dtype
from model_runtime.weights.gguf_families import gguf_family
from model_runtime.weights.gguf_file import GGML_TYPES, GgufFile, GgufTensor
from model_runtime.weights.gguf_names import LAYER, Names
from model_runtime.weights.safetensors_file import SafetensorsEntry
from model_runtime.weights.safetensors_source import FileTensor, Shard
from model_runtime.weights.source import Index, StoredTensor, read, whole

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_WHOLE = (".sinks", "_bias")
"""Endings of keys that nothing follows."""
_OF_HEADS = ("k_b_proj.weight", "v_b_proj.weight")
"""Matrices between heads and latents, in files one for each head, which attention takes as floats."""


def hf_key(name: str, names: Names = LAYER) -> str:
    """Hugging Face's key for a tensor of a GGUF file, or the name itself when the table does not know it."""
    stem, _, ending = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{ending}"
    block, _, rest = stem.partition(".")
    layer, _, inner = rest.partition(".")
    if block == "blk" and layer.isdecimal() and inner in names:
        key = f"model.layers.{layer}.{names[inner]}"
        return key if key.endswith(_WHOLE) else f"{key}.{ending}"
    return name


def _turned_in_pairs(num_rows: int, num_heads: int) -> Tensor | None:
    """Of each row where it is in the file: llama files order the rows of a head for rotating (x[2i], x[2i + 1]). None
    for rows that are not those of so many heads, which the loader refuses."""
    if num_rows % (2 * num_heads):
        return None
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


def _are_blocks(tensor: GgufTensor, columns: slice) -> bool:
    """Whether columns begin and end where blocks of numbers do."""
    elements = GGML_TYPES[tensor.type_id].elements
    return bool(columns.start % elements == 0 and columns.stop % elements == 0)


def _block_bytes(tensor: GgufTensor, columns: slice) -> slice:
    """Where the blocks of some columns are among the bytes of a row."""
    stored = GGML_TYPES[tensor.type_id]
    assert _are_blocks(tensor, columns), f"{columns} are not blocks of {stored.elements}"
    return slice(*(end // stored.elements * stored.num_bytes for end in (columns.start, columns.stop)))


class GgufStored:
    """A tensor in an open file, expanded as it is read: a StoredTensor."""

    def __init__(
        self, shard: Shard, tensor: GgufTensor, order: Tensor | None, *, added: float, as_floats: bool
    ) -> None:
        """`order`: where each of the rows is in the file, where that is not in order. `added`: what a vector's numbers
        are more there than they are in Hugging Face's files. `as_floats`: integers are always expanded."""
        self.file, self._tensor, self._order = shard.path.name, tensor, order
        self._added, self._as_floats = added, as_floats
        num_rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        self._raw = FileTensor(shard, SafetensorsEntry("U8", (num_rows, tensor.num_bytes // num_rows), tensor.offset))
        """[N, R]: the bytes of its rows; of a vector one row."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As in StoredTensor."""
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """As in StoredTensor."""
        return plain_dtype(self._tensor.type_id)

    @property
    def format(self) -> QuantizedFormat | None:
        """As in StoredTensor."""
        if self._as_floats or len(self.shape) != 2:
            return None
        return BLOCK_FORMATS.get(GGML_TYPES[self._tensor.type_id].name)

    def read_quantized(self, index: Index) -> QuantizedMatrix:
        """As in StoredTensor."""
        stored, (rows, columns) = self.format, index
        assert stored is not None, f"{self._tensor.name} holds no blocks of integers"
        data_NR = self._rows(rows, _block_bytes(self._tensor, columns))
        return QuantizedMatrix(data_NR=data_NR, format=stored, num_columns=columns.stop - columns.start)

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor. Raises CheckpointError for a format that cannot be expanded."""
        tensor = self._tensor
        if target.dtype not in (torch.float32, self.dtype):
            wide = torch.empty(target.shape)
            self.read_into(index, wide)
            target.copy_(wide)
        elif target.dim() == 1:
            whole_N = torch.empty(tensor.shape)
            dequantize(read(self._raw, whole(self._raw.shape)).flatten(), tensor.type_id, whole_N)
            whole_N = whole_N - self._added if self._added else whole_N
            target.copy_((whole_N if self._order is None else whole_N[self._order])[index])
        elif _are_blocks(tensor, index[1]):
            raw_NR = self._rows(index[0], _block_bytes(tensor, index[1]))
            dequantize(raw_NR.flatten(), tensor.type_id, target)
        else:
            wide_NK = torch.empty(target.shape[0], tensor.shape[1])
            dequantize(self._rows(index[0], slice(0, self._raw.shape[1])).flatten(), tensor.type_id, wide_NK)
            target.copy_(wide_NK[:, index[1]])

    def _rows(self, rows: slice, part: slice) -> Tensor:
        """Bytes of some rows of a matrix."""
        if self._order is None:
            return read(self._raw, (rows, part))
        places = self._order[rows]
        first, last = int(places.min()), int(places.max())
        return read(self._raw, (slice(first, last + 1), part))[places - first]


def gguf_tensors(file: GgufFile, config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a file, which stays open as long as they are there, under Hugging Face's keys; not those of layers
    for drafts. `config` is what `read_gguf_config` made of the same file."""
    shard, family = Shard(file.path), gguf_family(file)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if family.turned else {}
    num_blocks = file.metadata[f"{file.metadata['general.architecture']}.block_count"]
    assert isinstance(num_blocks, int), "the configuration was read"
    drafts = tuple(f"blk.{layer}." for layer in range(config.num_layers, num_blocks))
    found: dict[str, StoredTensor] = {}
    for name, tensor in file.tensors.items():
        if name.startswith(drafts):
            continue
        for key, part in _parts(hf_key(name, family.names), tensor):
            turned = heads.get(key.split(".")[-2]) if "." in key else None
            order = None if turned is None else _turned_in_pairs(part.shape[0], turned)
            added = 1.0 if config.norm_weights_less_one and key.endswith("norm.weight") else 0.0
            found[key] = GgufStored(shard, part, order, added=added, as_floats=key.endswith(_OF_HEADS))
    return found


def _parts(key: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """A tensor, or the experts in it."""
    if key.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1:  # the converter leaves out what is 1
        tensor = replace(tensor, shape=(1, *tensor.shape))
    if key.endswith(_OF_HEADS) and len(tensor.shape) == 3:
        tensor = replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))
    if "{}" not in key:
        yield key, tensor
        return
    count, *shape = tensor.shape
    size = tensor.num_bytes // count
    for expert in range(count):
        offset = tensor.offset + expert * size
        yield key.format(expert), replace(tensor, shape=tuple(shape), offset=offset, num_bytes=size)
