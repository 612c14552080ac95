"""What stands beside the numbers of a quantised matrix: scales, each of a block of its rows and columns. Used by
`scaled.py` and `integers.py`, engine and worker processes.

Legend: N rows, K columns of the matrix, G groups of columns; n, k, g those of a part.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from model_runtime.matrix_scheme import MatrixScheme
from model_runtime.quantized import FORMS, QuantizedFormat
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.source import StoredTensor, check_finite, read, whole

E8M0_BIAS = 127
"""Of an exponent without a mantissa."""


EXPANDED = torch.float16
"""What numbers become whose columns are no whole blocks of the format that they would be kept in: of three bits of
mantissa or few integers times a scale, float16 keeps more than bfloat16."""


_WIDE: Mapping[QuantizedFormat, QuantizedFormat] = MappingProxyType({"q4_0": "q4_0_128", "q4_z": "q4_z_128"})
"""Formats for columns that have a scale in common, where these are so many."""


def format_of(scheme: MatrixScheme, num_columns: int) -> QuantizedFormat | None:
    """What a matrix is kept in; None: it is expanded."""
    shared = scheme.block[1] or num_columns
    kept: QuantizedFormat | None = None
    if scheme.layout in ("fp8", "mxfp4"):
        kept = "fp8" if scheme.layout == "fp8" else "mxfp4"
    elif scheme.bits == 4:
        kept = "q4_0" if scheme.symmetric else "q4_z"
    elif scheme.symmetric:
        kept = "q8_0"
    if kept is None or scheme.any_order:
        return None
    span = FORMS[kept].numbers
    if num_columns % span or (shared < num_columns and shared % span):
        return None
    wide = _WIDE.get(kept, kept)
    return wide if shared >= num_columns or shared % FORMS[wide].group == 0 else kept


class Scales:
    """A number for each block of a matrix, stored in a tensor of as many dimensions as its maker liked."""

    def __init__(
        self, key: str, tensor: StoredTensor, shape: tuple[int, int], block: tuple[int, int], *, turned: bool = False
    ) -> None:
        """`block` as in MatrixScheme; `turned`: columns come first. Raises CheckpointError for another shape."""
        self.key, self._tensor, self._turned, self.dtype = key, tensor, turned, tensor.dtype
        self._block = tuple(size or max(count, 1) for size, count in zip(block, shape, strict=True))
        self.groups = -(-shape[1] // self._block[1])
        """G."""
        counts = (-(-shape[0] // self._block[0]), self.groups)
        self._counts = counts[::-1] if turned else counts
        found = [count for count in tensor.shape if count > 1]
        if found != [count for count in self._counts if count > 1]:
            raise CheckpointError(f"{key} has shape {list(tensor.shape)}; the blocks make it {list(self._counts)}")

    @property
    def columns(self) -> int:
        """That share one."""
        return self._block[1]

    def of(self, rows: slice) -> Tensor:
        """[n, G] float32."""
        first, last = rows.start // self._block[0], -(-rows.stop // self._block[0])
        found_nG = self._read(slice(first, last))
        if found_nG.dtype == torch.uint8:
            found_nG = torch.ldexp(torch.ones(()), found_nG.int() - E8M0_BIAS)
        found_nG = found_nG.float()
        check_finite(self.key, self._tensor, found_nG)
        if self._block[0] == 1:
            return found_nG
        return found_nG[torch.arange(rows.start, rows.stop) // self._block[0] - first]

    def _read(self, blocks: slice) -> Tensor:
        """[blocks, G] as stored, E8M0 as bytes."""
        tensor = self._tensor
        if len(tensor.shape) < 2:
            one = read(tensor, whole(tensor.shape)).view(self._counts)
            return (one.T if self._turned else one)[blocks]
        groups = slice(0, self.groups)
        return read(tensor, (groups, blocks)).T if self._turned else read(tensor, (blocks, groups))
