"""Fills a decoder's weight table from a checkpoint: every key used once, every parameter filled once, or an error that
names the keys. Called by `checkpoint.py`, engine and worker processes.

Memory above the finished parameters is a piece of one, of some 2^18 numbers, and what is made of it on the way.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from model_runtime.config import ActivationDtype, Quantization, RuntimeConfig
from model_runtime.device import give_back_memory
from model_runtime.ops.registry import PANEL_ROWS, MatrixForm, Ops, PackedWeight
from model_runtime.quantized import BLOCK, FORMS, QuantizedFormat, QuantizedMatrix, RowBits, is_finite, quantize
from model_runtime.share import Share
from model_runtime.weights.errors import AGAIN, CheckpointError
from model_runtime.weights.source import Index, StoredTensor, TensorSource, check_finite, check_float
from model_runtime.weights.table import Parameter, Parameters

MAX_NAMED_KEYS = 8
MIXED = torch.float16
"""What matrices become that are stacked and hold integers of several formats, as queries, keys and values do in most
GGUF files of Q4_K: their numbers, rounded to eleven bits."""
PIECE = 2**18
"""Numbers of a matrix that are read at a time, or those of the fewest rows that can be packed."""


def _named(keys: set[str]) -> str:
    shown = sorted(keys)[:MAX_NAMED_KEYS]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def check_keys(table: list[Parameter], source: TensorSource, ignorable: Callable[[str], bool]) -> None:
    """Raises CheckpointError that names missing keys, keys that nothing uses, and shapes that differ."""
    claimed = [slot.key for parameter in table for slot in parameter.slots]
    wanted = set(claimed)
    assert len(wanted) == len(claimed), "a checkpoint key is declared twice in the weight table"
    found = set(source)
    unused = {key for key in found - wanted if not ignorable(key)}
    problems = []
    if wanted - found:
        problems.append(f"missing are {_named(wanted - found)}")
    if unused:
        problems.append(f"unused are {_named(unused)}")
    if problems:
        raise CheckpointError(f"the checkpoint does not fit its architecture: {'; '.join(problems)}")
    for parameter in table:
        for slot in parameter.slots:
            expected, actual = parameter.slot_shape(slot), source[slot.key].shape
            if actual != expected:
                raise CheckpointError(f"{slot.key} has shape {list(actual)}; the architecture needs {list(expected)}")


ROW_BITS: Mapping[ActivationDtype, RowBits] = MappingProxyType({"auto": 16, "float32": 0})
"""Of rows for products with matrices of integers, as configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How a decoder's matrices are kept and multiplied."""

    quantization: Quantization = "none"
    """Turn matrices of floats into integers."""
    row_bits: RowBits = 16
    """What rows are quantised to for products with matrices of integers; 0: not, and those are expanded to float32."""

    @classmethod
    def of(cls, runtime: RuntimeConfig) -> "Precision":
        """As configured."""
        return cls(quantization=runtime.quantization, row_bits=ROW_BITS[runtime.activation_dtype])


EXACT = Precision(row_bits=0)
"""Every number as the checkpoint has it."""

_TARGETS: Mapping[Quantization, Mapping[int, QuantizedFormat]] = MappingProxyType(
    {"none": {}, "int8": {4: "q8_0", 8: "q8_0"}, "int4": {4: "q4_0", 8: "q8_0"}}
)
"""The format that a matrix is turned into, by its fewest bits."""


class _Part:
    """What a rank has of a parameter: some rows and columns of each of its slots."""

    def __init__(self, parameter: Parameter, source: TensorSource, share: Share) -> None:
        self.slots = [(slot.key, source[slot.key], parameter.index(slot, share)) for slot in parameter.slots]
        self.num_rows = sum(index[0].stop - index[0].start for _, _, index in self.slots)
        self.columns = parameter.columns_part(share) if parameter.columns is not None else slice(0, 1)

    @property
    def num_columns(self) -> int:
        """Of a vector 1."""
        return self.columns.stop - self.columns.start

    @property
    def dtype(self) -> torch.dtype:
        """The widest storage type. Raises CheckpointError for one that is not supported."""
        for key, tensor, _ in self.slots:
            check_float(key, tensor)
        return functools.reduce(torch.promote_types, (tensor.dtype for _, tensor, _ in self.slots))

    @property
    def format(self) -> QuantizedFormat | None:
        """That of the integers, where all slots hold some of one format in whole blocks."""
        formats = {tensor.format for _, tensor, _ in self.slots}
        stored = formats.pop()
        if formats or stored is None or self.columns.start % FORMS[stored].numbers:
            return None
        return None if self.columns.stop % FORMS[stored].numbers else stored

    @property
    def is_mixed(self) -> bool:
        """Whether all slots hold integers, and not all of one format."""
        formats = {tensor.format for _, tensor, _ in self.slots}
        return len(formats) > 1 and None not in formats

    def within(self, rows: slice) -> Iterator[tuple[str, StoredTensor, Index, slice]]:
        """Of some of all rows: the tensors that have them, where there, and where among these."""
        start = 0
        for key, tensor, index in self.slots:
            count = index[0].stop - index[0].start
            first, last = max(rows.start, start), min(rows.stop, start + count)
            if first < last:
                shift = index[0].start - start
                place = (slice(first + shift, last + shift), *index[1:])
                yield key, tensor, place, slice(first - rows.start, last - rows.start)
            start += count

    def floats(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Some of the rows, or of a vector's numbers. Raises CheckpointError where they are not finite."""
        width = self.slots[0][2][1:] and (self.num_columns,)
        read_NK = torch.empty(rows.stop - rows.start, *width, dtype=dtype)
        for key, tensor, index, place in self.within(rows):
            tensor.read_into(index, read_NK[place])
            check_finite(key, tensor, read_NK[place])
        return read_NK

    def integers(self, rows: slice, stored: QuantizedFormat) -> QuantizedMatrix:
        """The same of a matrix of integers."""
        parts = []
        for key, tensor, index, _ in self.within(rows):
            parts.append(tensor.read_quantized(index))
            _check_scales(key, tensor, parts[-1])
        data_NR = torch.cat([part.data_NR for part in parts])
        return QuantizedMatrix(data_NR=data_NR, format=stored, num_columns=self.num_columns)

    def made_integers(self, rows: slice, dtype: torch.dtype, target: QuantizedFormat) -> QuantizedMatrix:
        """The same of floats that become such a matrix."""
        made = quantize(self.floats(rows, dtype), target)
        if not is_finite(made):
            for key, tensor, _, place in self.within(rows):
                _check_scales(key, tensor, replace(made, data_NR=made.data_NR[place]))
        return made


def _check_scales(key: str, tensor: StoredTensor, matrix: QuantizedMatrix) -> None:
    if not is_finite(matrix):
        raise CheckpointError(f"NaN or infinite weights, or too large ones, in {key} ({tensor.file}): {AGAIN}")


def _form(part: _Part, how: Precision, fewest_bits: int) -> MatrixForm:
    """As the file has it, unless floats are to become integers."""
    target = None if part.num_columns % BLOCK else _TARGETS[how.quantization].get(fewest_bits)
    expanded = MIXED if part.is_mixed and how.row_bits else part.dtype
    stored = part.format or target or expanded
    return MatrixForm(part.num_rows, part.num_columns, stored, how.row_bits)


def matrix_form(parameter: Parameter, source: TensorSource, share: Share, how: Precision) -> MatrixForm:
    """What a rank's part of a matrix will be packed from."""
    return _form(_Part(parameter, source, share), how, parameter.fewest_bits)


def _packed(part: _Part, ops: Ops, device: torch.device, how: Precision, fewest_bits: int) -> PackedWeight:
    """A matrix, piece by piece: beside the packed one there is never more than a piece."""
    form = _form(part, how, fewest_bits)
    packed = ops.empty_matrix(form, device)
    step = max(PIECE // part.num_columns // PANEL_ROWS, 1) * PANEL_ROWS
    for start in range(0, part.num_rows, step):
        rows = slice(start, min(start + step, part.num_rows))
        if isinstance(form.stored, torch.dtype):
            piece: Tensor | QuantizedMatrix = part.floats(rows, form.stored)
        elif part.format is None:
            piece = part.made_integers(rows, part.dtype, form.stored)
        else:
            piece = part.integers(rows, form.stored)
        ops.fill_rows(packed, start, piece)
    return packed


def load_parameters(
    table: list[Parameter],
    source: TensorSource,
    ops: Ops,
    device: torch.device,
    ignorable: Callable[[str], bool],
    progress: Callable[[int], None],
    share: Share,
    precision: Precision = EXACT,
) -> Parameters:
    """Read, stack and pack a rank's part of every parameter; `progress` is told how many numbers each one has, in all
    ranks together.

    Matrices are packed in their storage type unless `precision` says otherwise, vectors become float32. Raises
    CheckpointError, before anything is read where the keys or shapes are wrong; whatever is raised, the memory of what
    was loaded is given back.
    """
    check_keys(table, source, ignorable)
    parameters = Parameters({}, {})
    try:
        for parameter in table:
            if parameter.belongs_to(share):
                _fill(parameters, parameter, _Part(parameter, source, share), ops, device, precision)
            progress(parameter.numbers)
    except BaseException:
        parameters.matrices.clear()
        parameters.vectors.clear()
        give_back_memory(device)
        raise
    return parameters


def _fill(
    parameters: Parameters, parameter: Parameter, part: _Part, ops: Ops, device: torch.device, precision: Precision
) -> None:
    if parameter.columns is not None:
        parameters.matrices[parameter.name] = _packed(part, ops, device, precision, parameter.fewest_bits)
        return
    vector = part.floats(slice(0, part.num_rows), part.dtype).to(device).float()
    parameters.vectors[parameter.name] = vector + parameter.added if parameter.added else vector
