"""A text model's tensors under the keys that weight tables name, where a family's files call them otherwise or keep
several matrices in one. Used by `opening.py`, engine and worker processes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from math import prod

from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.models.family import Family
from model_runtime.models.packages import family_named
from model_runtime.quantized import QuantizedMatrix
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.latent_heads import latent_heads
from model_runtime.weights.source import Index, Numbers, StoredTensor, TensorSource, read, whole
from model_runtime.weights.stacks import unstacked


def plain_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The tensors under plain keys. Raises CheckpointError for a matrix that has not the rows of its parts together."""
    spelling = spelling_of(config)
    order = family_named(config.family).stacked_experts
    source = unstacked(source, order, config.hidden_size) if order else source
    source = {key: Flat(tensor) if len(tensor.shape) > 2 else tensor for key, tensor in source.items()}
    names: dict[str, tuple[str, slice]] = {}
    for key in sorted(source):
        rows = (*source[key].shape, 1)[0]
        parts = spelling(key, rows)
        count = sum(part.stop - part.start for part in parts.values())
        if parts and count != rows:
            raise CheckpointError(f"{key} has {rows} rows; the architecture needs {count}")
        if twice := sorted(parts.keys() & names.keys()):
            raise CheckpointError(f"the checkpoint holds {twice[0]} twice, as {names[twice[0]][0]} and as {key}")
        names |= {plain: (key, part) for plain, part in parts.items() if plain}
    return latent_heads({plain: _rows(source[key], rows) for plain, (key, rows) in names.items()}, config)


def _rows(tensor: StoredTensor, rows: slice) -> StoredTensor:
    return tensor if rows == slice(0, (*tensor.shape, 1)[0]) else Rows(tensor, rows)


def spelling_of(config: ModelConfig) -> Callable[[str, int], Mapping[str, slice]]:
    """(a key of the family's files, rows of its tensor) -> the plain keys for what is in it, and the rows of each."""
    family = family_named(config.family)
    spelling = family.spelling or partial(_usual, family)
    return lambda key, rows: spelling(key, rows, config)


def _usual(family: Family, key: str, rows: int, config: ModelConfig) -> Mapping[str, slice]:
    """As in `Family.spelling`: parts of keys renamed, and matrices that are several cut."""
    if family.unused and key.startswith(family.unused):
        return {}
    plain = ".".join(family.renamed.get(part, part) for part in key.split("."))
    owner, _, rest = plain.rpartition(".")
    module, _, name = owner.rpartition(".")
    if (fused := _parts(config).get(name)) is None:
        return {plain: slice(0, rows)}
    parts = zip(fused.items(), accumulate(fused.values()), strict=True)
    return {f"{module}.{part}.{rest}": slice(end - count, end) for (part, count), end in parts}


def _parts(config: ModelConfig) -> Mapping[str, Mapping[str, int]]:
    """Of matrices that are several one under the other: the names and rows of these, in order."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = config.intermediate_size
    return {
        "qkv_proj": {"q_proj": query, "k_proj": key, "v_proj": key},
        "gate_up_proj": {"gate_proj": width, "up_proj": width},
    }


class Rows:
    """Some rows of a tensor: a StoredTensor."""

    def __init__(self, tensor: StoredTensor, rows: slice) -> None:
        self._tensor, self._rows = tensor, rows
        self.shape: tuple[int, ...] = (rows.stop - rows.start, *tensor.shape[1:])
        self.dtype, self.file, self.format = tensor.dtype, tensor.file, tensor.format

    def read_quantized(self, index: Index) -> QuantizedMatrix:
        """As in StoredTensor."""
        return self._tensor.read_quantized(self._at(index))

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        self._tensor.read_into(self._at(index), target)

    def _at(self, index: Index) -> Index:
        """Where some of the rows are in the tensor."""
        start = self._rows.start
        return (slice(start + index[0].start, start + index[0].stop), *index[1:])


class Flat(Numbers):
    """A small tensor of many dimensions as a vector: a StoredTensor."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor
        self.shape: tuple[int, ...] = (prod(tensor.shape),)
        self.dtype, self.file = tensor.dtype, tensor.file

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor; reads all."""
        target.copy_(read(self._tensor, whole(self._tensor.shape)).flatten()[index[0]])
