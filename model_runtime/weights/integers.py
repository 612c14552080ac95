"""Matrices of integers with scales of groups of columns, as compressed-tensors, GPTQ and AWQ store them. Used by
`matrices.py`, engine and worker processes.

Every number is (code - zero point) * scale, codes unsigned. Words of 32 bits hold 8 or 4 codes, the first in the lowest
bits; AWQ has them in another order.

Legend: N rows, K columns of a matrix, G groups of columns; n, k those of a part; W words.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from model_runtime.matrix_scheme import MatrixScheme
from model_runtime.quantized import FORMS, QuantizedFormat, QuantizedMatrix, join_blocks
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.grids import EXPANDED, Scales, format_of
from model_runtime.weights.source import Index, LastRead, StoredTensor, TensorSource, read, whole

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ each of eight neighbours is."""


class Codes(Protocol):
    """How a tool lays out codes and zero points."""

    shape: tuple[int, int]
    """Of the matrix."""
    file: str

    def codes(self, rows: slice, columns: slice) -> Tensor:
        """[n, k] uint8."""
        ...

    def zeros(self, rows: slice) -> Tensor | None:
        """[n, G] uint8; None where all are in the middle."""
        ...


def codes_of_words(words: Tensor, bits: int) -> Tensor:
    """uint8, along the last dimension."""
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), dim=-1).flatten(-2)


def _words(codes: slice, per_word: int) -> slice:
    """Those that have some codes."""
    return slice(codes.start // per_word, -(-codes.stop // per_word))


def _within(codes: slice, per_word: int) -> slice:
    """Where codes are among those of their words."""
    start = codes.start % per_word
    return slice(start, start + codes.stop - codes.start)


def _needed(source: TensorSource, key: str) -> StoredTensor:
    """Raises CheckpointError where there is none."""
    if key not in source:
        raise CheckpointError(f"the checkpoint does not fit its quantization_config: missing is {key}")
    return source[key]


def _beside(source: TensorSource, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor:
    """A tensor of a type and shape. Raises CheckpointError."""
    tensor = _needed(source, key)
    if tensor.dtype != dtype or tensor.shape != shape:
        name = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{key} is {tensor.dtype} {list(tensor.shape)}; the format needs {name} {list(shape)}")
    return tensor


def _last_size(key: str, tensor: StoredTensor) -> int:
    """The columns of a matrix whose shape a tensor holds. Raises CheckpointError."""
    if tensor.shape != (2,) or tensor.dtype not in (torch.int32, torch.int64):
        raise CheckpointError(f"{key} is {tensor.dtype} {list(tensor.shape)}, and not the shape of a matrix")
    return int(read(tensor, whole(tensor.shape))[1])


class PlainCodes:
    """int8 [N, K], zero points [N, G]: Codes."""

    def __init__(self, module: str, source: TensorSource, scheme: MatrixScheme) -> None:
        self._codes = source[f"{module}.weight"]
        self.shape, self.file = (self._codes.shape[0], self._codes.shape[1]), self._codes.file
        self._zeros: StoredTensor | None = None
        if not scheme.symmetric:
            groups = scheme.num_groups(self.shape[1])
            self._zeros = _beside(source, f"{module}.weight_zero_point", torch.int8, (self.shape[0], groups))

    def codes(self, rows: slice, columns: slice) -> Tensor:
        """As in Codes."""
        return read(self._codes, (rows, columns)).view(torch.uint8) ^ 128

    def zeros(self, rows: slice) -> Tensor | None:
        """As in Codes."""
        if self._zeros is None:
            return None
        return read(self._zeros, (rows, slice(0, self._zeros.shape[1]))).view(torch.uint8) ^ 128


class PackedCodes:
    """compressed-tensors: words [N, W] along rows, zero points [W, G] along columns: Codes."""

    def __init__(self, module: str, source: TensorSource, scheme: MatrixScheme) -> None:
        self._bits, self._per_word = scheme.bits, 32 // scheme.bits
        self._codes = source[f"{module}.weight_packed"]
        num_rows, num_words = self._codes.shape
        num_columns = num_words * self._per_word
        if (key := f"{module}.weight_shape") in source:
            num_columns = _last_size(key, source[key])
        self._codes = _beside(
            source, f"{module}.weight_packed", torch.int32, (num_rows, -(-num_columns // self._per_word))
        )
        self.shape, self.file = (num_rows, num_columns), self._codes.file
        self._zeros: StoredTensor | None = None
        if not scheme.symmetric:
            groups = scheme.num_groups(num_columns)
            shape = (-(-num_rows // self._per_word), groups)
            self._zeros = _beside(source, f"{module}.weight_zero_point", torch.int32, shape)

    def codes(self, rows: slice, columns: slice) -> Tensor:
        """As in Codes."""
        words_nW = read(self._codes, (rows, _words(columns, self._per_word)))
        return codes_of_words(words_nW, self._bits)[:, _within(columns, self._per_word)]

    def zeros(self, rows: slice) -> Tensor | None:
        """As in Codes."""
        if self._zeros is None:
            return None
        words_WG = read(self._zeros, (_words(rows, self._per_word), slice(0, self._zeros.shape[1])))
        return codes_of_words(words_WG.T, self._bits)[:, _within(rows, self._per_word)].T


class GptqCodes:
    """Words [W, N] along columns of the matrix, zero points [G, W] along its rows: Codes."""

    def __init__(self, module: str, source: TensorSource, scheme: MatrixScheme, last: LastRead) -> None:
        self._bits, self._per_word, self._offset = scheme.bits, 32 // scheme.bits, scheme.zero_offset
        self._codes, self._last = source[f"{module}.qweight"], last
        num_words, num_rows = self._codes.shape
        self.shape, self.file = (num_rows, num_words * self._per_word), self._codes.file
        groups = scheme.num_groups(self.shape[1])
        self._zeros = _beside(source, f"{module}.qzeros", torch.int32, (groups, -(-num_rows // self._per_word)))

    def codes(self, rows: slice, columns: slice) -> Tensor:
        """As in Codes."""
        words_WN = self._last.read(self._codes, (_words(columns, self._per_word), slice(0, self.shape[0])))
        return codes_of_words(words_WN[:, rows].T, self._bits)[:, _within(columns, self._per_word)]

    def zeros(self, rows: slice) -> Tensor | None:
        """As in Codes."""
        words_GW = read(self._zeros, (slice(0, self._zeros.shape[0]), _words(rows, self._per_word)))
        zeros_Gn = codes_of_words(words_GW, self._bits)[:, _within(rows, self._per_word)]
        return zeros_Gn.add(self._offset).bitwise_and(2**self._bits - 1).T


class AwqCodes:
    """Words [K, W] and zero points [G, W] along rows of the matrix: Codes."""

    def __init__(self, module: str, source: TensorSource, scheme: MatrixScheme, last: LastRead) -> None:
        self._codes, self._last = source[f"{module}.qweight"], last
        num_columns, num_words = self._codes.shape
        self.shape, self.file = (num_words * 8, num_columns), self._codes.file
        groups = scheme.num_groups(num_columns)
        self._zeros = _beside(source, f"{module}.qzeros", torch.int32, (groups, num_words))

    def codes(self, rows: slice, columns: slice) -> Tensor:
        """As in Codes."""
        words_KW = self._last.read(self._codes, (columns, slice(0, self._codes.shape[1])))
        return _awq_codes(words_KW[:, _words(rows, 8)])[:, _within(rows, 8)].T

    def zeros(self, rows: slice) -> Tensor | None:
        """As in Codes."""
        words_GW = read(self._zeros, (slice(0, self._zeros.shape[0]), _words(rows, 8)))
        return _awq_codes(words_GW)[:, _within(rows, 8)].T


def _awq_codes(words: Tensor) -> Tensor:
    return codes_of_words(words, 4).view(*words.shape, 8)[..., list(AWQ_ORDER)].flatten(-2)


class GroupedIntegers:
    """A matrix of integers: a StoredTensor."""

    dtype = EXPANDED

    def __init__(
        self, module: str, codes: Codes, scales: Scales, scheme: MatrixScheme, group_of: StoredTensor | None
    ) -> None:
        """`group_of` [K]: the group of each column where GPTQ chose an order of its own."""
        self._module, self._codes, self._scales, self._scheme = module, codes, scales, scheme
        self.shape: tuple[int, ...] = codes.shape
        self.file = codes.file
        self._group_of = torch.arange(codes.shape[1]) // scales.columns
        is_in_order = True
        if group_of is not None:
            in_order, self._group_of = self._group_of, read(group_of, whole(group_of.shape)).long()
            if sorted(self._group_of.tolist()) != in_order.tolist():
                raise CheckpointError(f"{module}: its columns are not in groups of {scales.columns}")
            is_in_order = torch.equal(self._group_of, in_order)
        self.format: QuantizedFormat | None = format_of(replace(scheme, any_order=not is_in_order), codes.shape[1])

    def read_quantized(self, index: Index) -> QuantizedMatrix:
        """As in StoredTensor."""
        rows, columns = index
        assert self.format is not None, f"{self._module} is not kept as integers"
        form = FORMS[self.format]
        assert columns.start % form.group == 0, f"column {columns.start} of {self._module} is inside a group"
        groups = self._group_of[columns.start : columns.stop : form.group]
        scales_nG, codes_nk, zeros_nG = self._scales.of(rows)[:, groups], self._codes.codes(*index), self._zeros(rows)
        if not scales_nG.half().isfinite().all():
            raise CheckpointError(f"{self._scales.key} ({self.file}) has numbers beyond those of float16")
        if zeros_nG is not None:
            return join_blocks(self.format, (scales_nG, zeros_nG[:, groups]), codes_nk)
        return join_blocks(self.format, (scales_nG,), codes_nk if form.bits == 4 else codes_nk ^ 128)

    def read_into(self, index: Index, target: Tensor) -> None:
        """As in StoredTensor."""
        rows, groups = index[0], self._group_of[index[1]]
        zeros_nG = self._zeros(rows)
        zeros = self._middle if zeros_nG is None else zeros_nG[:, groups].float()
        target.copy_((self._codes.codes(*index).float() - zeros) * self._scales.of(rows)[:, groups])

    @property
    def _middle(self) -> int:
        return 1 << self._scheme.bits - 1

    def _zeros(self, rows: slice) -> Tensor | None:
        """None, or of integers that are not symmetric. Raises CheckpointError where they contradict that."""
        zeros_nG = self._codes.zeros(rows)
        if zeros_nG is None or not self._scheme.symmetric:
            return zeros_nG
        if (zeros_nG != self._middle).any():
            raise CheckpointError(f"{self._module} ({self.file}) has zero points; quantization_config says symmetric")
        return None


def compressed_integers(module: str, source: TensorSource, scheme: MatrixScheme) -> GroupedIntegers:
    """Of compressed-tensors. Raises CheckpointError where tensors do not fit."""
    codes: Codes = (PackedCodes if scheme.layout == "packed" else PlainCodes)(module, source, scheme)
    key = f"{module}.weight_scale"
    scales = Scales(key, _needed(source, key), codes.shape, scheme.block)
    return GroupedIntegers(module, codes, scales, scheme, source.get(f"{module}.weight_g_idx"))


def turned_integers(module: str, source: TensorSource, scheme: MatrixScheme, last: LastRead) -> GroupedIntegers:
    """Of GPTQ or AWQ, whose tensors have columns first. Raises CheckpointError where tensors do not fit."""
    codes: Codes = (GptqCodes if scheme.layout == "gptq" else AwqCodes)(module, source, scheme, last)
    key = f"{module}.scales"
    scales = Scales(key, _needed(source, key), codes.shape, scheme.block, turned=True)
    return GroupedIntegers(module, codes, scales, scheme, source.get(f"{module}.g_idx"))
