"""A text model's tensors under the keys that weight tables name, where a family's files call them otherwise or keep
several matrices in one. Used by `checkpoint.py`, engine and worker processes.
"""

from collections.abc import Mapping
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.models.family import Family
from model_runtime.models.packages import family_named
from model_runtime.quantized import QuantizedFormat, QuantizedMatrix
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.source import Index, TensorSource
from model_runtime.weights.stacks import Stacks


def plain_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The tensors under plain keys. Raises CheckpointError for a matrix that has not the rows of its parts together."""
    family = family_named(config.family)
    spelling = family.spelling or partial(_usual, family)
    source = Stacks(source) if family.stacked_experts else source
    names: dict[str, tuple[str, slice]] = {}
    for key in sorted(source.keys()):
        rows = source.shape(key)[0] if source.shape(key) else 1
        parts = spelling(key, rows, config)
        count = sum(part.stop - part.start for part in parts.values())
        if parts and count != rows:
            raise CheckpointError(f"{key} has {rows} rows; the architecture needs {count}")
        if twice := sorted(parts.keys() & names.keys()):
            raise CheckpointError(f"the checkpoint holds {twice[0]} twice, as {names[twice[0]][0]} and as {key}")
        names |= {plain: (key, part) for plain, part in parts.items()}
    return source if set(names) == set(source.keys()) else Spelled(source, names)


def _usual(family: Family, key: str, rows: int, config: ModelConfig) -> Mapping[str, slice]:
    """As in `Family.spelling`: parts of keys renamed, and matrices that are several cut."""
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


class Spelled:
    """Tensors of a source, or some of their rows, under other keys: a TensorSource."""

    def __init__(self, source: TensorSource, names: Mapping[str, tuple[str, slice]]) -> None:
        """`names` has the source's key and the rows there for each new one."""
        self._source, self._names = source, names

    def keys(self) -> frozenset[str]:
        """As in TensorSource."""
        return frozenset(self._names)

    def shape(self, key: str) -> tuple[int, ...]:
        """As in TensorSource."""
        name, rows = self._names[key]
        return (rows.stop - rows.start, *self._source.shape(name)[1:])

    def dtype(self, key: str) -> torch.dtype:
        """As in TensorSource."""
        return self._source.dtype(self._names[key][0])

    def quantized(self, key: str) -> QuantizedFormat | None:
        """As in TensorSource."""
        return self._source.quantized(self._names[key][0])

    def read_quantized(self, key: str, index: Index) -> QuantizedMatrix:
        """As in TensorSource."""
        return self._source.read_quantized(*self._at(key, index))

    def read_into(self, key: str, index: Index, target: Tensor) -> None:
        """As in TensorSource."""
        name, moved = self._at(key, index)
        self._source.read_into(name, moved, target)

    def _at(self, key: str, index: Index) -> tuple[str, Index]:
        """Where the rows of a new key are in the source."""
        name, rows = self._names[key]
        return name, (slice(rows.start + index[0].start, rows.start + index[0].stop), *index[1:])
