"""The matrix that makes keys and values of latent vectors, as the two matrices by head that attention over the vectors
themselves needs: a part of `spelling.py`, engine and worker processes.

Checkpoints have `kv_b_proj` [H (P + V), L], of each head P rows for its keys and V for its values. Queries go the other
way, from P channels to L, so keys' rows are transposed: `k_b_proj` [H L, P] and `v_b_proj` [H V, L].

Legend: H heads, L latent rank, P channels of a key that are made of latents, V channels of a value.
"""

from collections.abc import Iterator

from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.source import Index, Numbers, StoredTensor, TensorSource, read

_ENDING, _KEYS, _VALUES = "kv_b_proj.weight", "k_b_proj.weight", "v_b_proj.weight"


def latent_heads(source: TensorSource, config: ModelConfig) -> TensorSource:
    """With these matrices in two; integers become floats. Raises CheckpointError for one that is not of the
    architecture's heads."""
    if config.latent is None:
        return source
    plain, value = config.head_dim - config.latent.shared_dim, config.latent.value_dim
    wanted, found = (config.num_heads * (plain + value), config.latent.latent_rank), dict(source)
    for key in [key for key in source if key.endswith(_ENDING)]:
        whole, owner = found.pop(key), key.removesuffix(_ENDING)
        if whole.shape != wanted:
            raise CheckpointError(f"{key} has shape {list(whole.shape)}; the architecture needs {list(wanted)}")
        found[owner + _KEYS] = _Keys(whole, config.num_heads, plain)
        found[owner + _VALUES] = _Values(whole, config.num_heads, plain)
    return found


def _of_heads(rows: slice, size: int) -> Iterator[tuple[int, slice, slice]]:
    """(head, which of its rows, where among these) of rows of heads of `size` rows."""
    for head in range(rows.start // size, -(-rows.stop // size)):
        first, last = max(rows.start, head * size), min(rows.stop, (head + 1) * size)
        yield head, slice(first - head * size, last - head * size), slice(first - rows.start, last - rows.start)


class _Keys(Numbers):
    """What takes queries of all heads to the space of latents: a StoredTensor."""

    def __init__(self, whole: StoredTensor, num_heads: int, plain: int) -> None:
        self._whole = whole
        self._in_head, self._rank = whole.shape[0] // num_heads, whole.shape[1]
        self.shape: tuple[int, ...] = (num_heads * self._rank, plain)
        self.dtype, self.file = whole.dtype, whole.file

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        for head, ranks, there in _of_heads(index[0], self._rank):
            first = head * self._in_head
            channels = slice(first + index[1].start, first + index[1].stop)
            target[there] = read(self._whole, (channels, ranks), target.dtype).T


class _Values(Numbers):
    """What makes values of all heads of latents: a StoredTensor."""

    def __init__(self, whole: StoredTensor, num_heads: int, plain: int) -> None:
        self._whole, self._plain, self._in_head = whole, plain, whole.shape[0] // num_heads
        self._value = self._in_head - plain
        self.shape: tuple[int, ...] = (num_heads * self._value, whole.shape[1])
        self.dtype, self.file = whole.dtype, whole.file

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        for head, values, there in _of_heads(index[0], self._value):
            first = head * self._in_head + self._plain
            rows = slice(first + values.start, first + values.stop)
            target[there] = read(self._whole, (rows, index[1]), target.dtype)
