"""What a rank has of a parameter, read as floats or integers. Used by `load.py`, engine and worker processes.

Integers whose groups have a scale in common stay in groups where a rank's columns begin with one, and are blocks with
the group's scale in each where they begin inside one.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from model_runtime.quantized import BLOCK, FORMS, QuantizedFormat, QuantizedMatrix, columns_of, is_finite, quantize
from model_runtime.share import Share
from model_runtime.weights.errors import AGAIN, CheckpointError
from model_runtime.weights.source import Index, StoredTensor, TensorSource, check_finite, check_float
from model_runtime.weights.table import Parameter


class Part:
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
        formats = self._formats
        stored = formats.pop()
        if formats or stored is None or self.columns.start % FORMS[stored].numbers:
            return None
        return None if self.columns.stop % FORMS[stored].numbers else stored

    @property
    def is_mixed(self) -> bool:
        """Whether all slots hold integers, and not all of one format."""
        formats = self._formats
        return len(formats) > 1 and None not in formats

    @property
    def _formats(self) -> set[QuantizedFormat | None]:
        """Of all slots, as they have to be kept: groups are taken apart where columns begin inside one, or beside
        slots of another format."""
        formats = {tensor.format for _, tensor, _ in self.slots}
        if len(formats) == 1 and all(form is None or self.suits(form) for form in formats):
            return formats
        return {None if form is None else FORMS[form].repeated or form for form in formats}

    def suits(self, stored: QuantizedFormat) -> bool:
        """Whether columns begin with a group; the last one may be of fewer blocks."""
        return self.columns.start % FORMS[stored].group == 0

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

    def floats(self, rows: slice, dtype: torch.dtype, *columns: slice) -> Tensor:
        """Some of the rows, or of a vector's numbers. Raises CheckpointError where they are not finite. Columns, if
        they are given, in place of the part's own."""
        columns = columns or self.slots[0][2][1:]
        width = [part.stop - part.start for part in columns]
        read_NK = torch.empty(rows.stop - rows.start, *width, dtype=dtype)
        for key, tensor, index, place in self.within(rows):
            tensor.read_into((index[0], *columns), read_NK[place])
            check_finite(key, tensor, read_NK[place])
        return read_NK

    def integers(self, rows: slice, stored: QuantizedFormat) -> QuantizedMatrix:
        """The same of a matrix of integers."""
        parts = []
        for key, tensor, index, _ in self.within(rows):
            parts.append(_read_as(stored, tensor, index))
            _check_scales(key, tensor, parts[-1])
        data_NR = torch.cat([part.data_NR for part in parts])
        return QuantizedMatrix(data_NR=data_NR, format=stored, num_columns=self.num_columns)

    def made_integers(
        self, rows: slice, dtype: torch.dtype, target: QuantizedFormat, stored: QuantizedFormat
    ) -> QuantizedMatrix:
        """The same of floats that become a matrix of the target format, of which these columns are stored as said."""
        if FORMS[target].repeated is None:
            made = quantize(self.floats(rows, dtype), target)
        else:
            around = _whole_groups(self.columns, target, self.slots[0][1].shape[1] // BLOCK * BLOCK)
            made = quantize(self.floats(rows, dtype, around), target)
            made = columns_of(made, _within(around, self.columns), stored)
        if not is_finite(made):
            for key, tensor, _, place in self.within(rows):
                _check_scales(key, tensor, replace(made, data_NR=made.data_NR[place]))
        return made


def _check_scales(key: str, tensor: StoredTensor, matrix: QuantizedMatrix) -> None:
    if not is_finite(matrix):
        raise CheckpointError(f"NaN or infinite weights, or too large ones, in {key} ({tensor.file}): {AGAIN}")


def _whole_groups(columns: slice, stored: QuantizedFormat, end: int) -> slice:
    """Columns from the beginning of a group to the end of one, or of all."""
    group = FORMS[stored].group
    return slice(columns.start // group * group, min(-(-columns.stop // group) * group, end))


def _within(around: slice, columns: slice) -> slice:
    """Where columns are among more of them."""
    return slice(columns.start - around.start, columns.stop - around.start)


def _read_as(stored: QuantizedFormat, tensor: StoredTensor, index: Index) -> QuantizedMatrix:
    """A part of a matrix of integers in its format, or in that of the blocks of its groups."""
    if tensor.format in (stored, None):
        return tensor.read_quantized(index)
    rows, columns = index
    around = _whole_groups(columns, tensor.format, tensor.shape[1])
    return columns_of(tensor.read_quantized((rows, around)), _within(around, columns), stored)
