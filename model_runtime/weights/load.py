"""Fills a decoder's weight table from a checkpoint: every key used once, every parameter filled once, or an error that
names the keys. Called by `checkpoint.py`, engine and worker processes.

Memory above the finished parameters is one parameter in the checkpoint's storage type and one tensor of the file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from model_runtime.config import Quantization
from model_runtime.ops.registry import Ops, PackedWeight
from model_runtime.quantized import BLOCK, QuantizedFormat, QuantizedMatrix, quantize, scales_are_finite
from model_runtime.share import Share
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.source import TensorSource
from model_runtime.weights.table import Parameter, Parameters

MAX_NAMED_KEYS = 8


def _named(keys: set[str]) -> str:
    shown = sorted(keys)[:MAX_NAMED_KEYS]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def check_keys(table: list[Parameter], source: TensorSource, ignorable: Callable[[str], bool]) -> None:
    """Raises CheckpointError that names missing keys, keys that nothing uses, and shapes that differ."""
    claimed = [slot.key for parameter in table for slot in parameter.slots]
    wanted = set(claimed)
    assert len(wanted) == len(claimed), "a checkpoint key is declared twice in the weight table"
    found = source.keys()
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
            expected, actual = parameter.slot_shape(slot), source.shape(slot.key)
            if actual != expected:
                raise CheckpointError(f"{slot.key} has shape {list(actual)}; the architecture needs {list(expected)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How a decoder's matrices are kept and multiplied."""

    quantization: Quantization = "none"
    """Turn matrices of floats into integers."""
    integer_rows: bool = True
    """Quantise rows for products with matrices of integers; else those are expanded to float32."""


EXACT = Precision(integer_rows=False)
"""Every number as the checkpoint has it."""

_TARGETS: Mapping[Quantization, Mapping[int, QuantizedFormat]] = MappingProxyType(
    {"none": {}, "int8": {4: "q8_0", 8: "q8_0"}, "int4": {4: "q4_0", 8: "q8_0"}}
)
"""The format that a matrix is turned into, by its fewest bits."""


def _read(parameter: Parameter, source: TensorSource, share: Share) -> Tensor:
    """A rank's parts of all slots stacked, in the widest storage type among them."""
    dtype = source.dtype(parameter.slots[0].key)
    for slot in parameter.slots[1:]:
        dtype = torch.promote_types(dtype, source.dtype(slot.key))
    indices = [parameter.index(slot, share) for slot in parameter.slots]
    lengths = [index[0].stop - index[0].start for index in indices]
    width = (part.stop - part.start for part in indices[0][1:])
    stacked = torch.empty(sum(lengths), *width, dtype=dtype)
    for slot, index, rows in zip(parameter.slots, indices, torch.split(stacked, lengths), strict=True):
        source.read_into(slot.key, index, rows)
    if not torch.isfinite(stacked.sum(dtype=torch.float32)):
        raise CheckpointError(f"NaN or infinite weights in {_keys_of(parameter)}")
    return stacked


def _keys_of(parameter: Parameter) -> str:
    return ", ".join(slot.key for slot in parameter.slots)


def _read_quantized(parameter: Parameter, source: TensorSource, share: Share) -> QuantizedMatrix | None:
    """A rank's parts of all slots stacked, where they hold integers of one format in whole blocks; else None."""
    columns = parameter.columns_part(share)
    if columns.start % BLOCK or columns.stop % BLOCK:
        return None
    stored = source.quantized(parameter.slots[0].key)
    if stored is None or len({source.quantized(slot.key) for slot in parameter.slots}) > 1:
        return None
    parts = [source.read_quantized(slot.key, parameter.index(slot, share)).data_NR for slot in parameter.slots]
    return QuantizedMatrix(data_NR=torch.cat(parts), format=stored, num_columns=columns.stop - columns.start)


def _packed(
    parameter: Parameter, source: TensorSource, ops: Ops, device: torch.device, how: Precision, share: Share
) -> PackedWeight:
    matrix = _read_quantized(parameter, source, share)
    if matrix is None:
        weight_NK = _read(parameter, source, share)
        target = _TARGETS[how.quantization].get(parameter.fewest_bits)
        if target is None or weight_NK.shape[1] % BLOCK:
            return ops.pack(weight_NK.to(device))
        matrix = quantize(weight_NK, target)
    if not scales_are_finite(matrix):
        raise CheckpointError(f"NaN or infinite weights, or too large ones, in {_keys_of(parameter)}")
    return ops.pack_quantized(replace(matrix, data_NR=matrix.data_NR.to(device)), how.integer_rows)


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
    CheckpointError, before anything is read where the keys or shapes are wrong.
    """
    check_keys(table, source, ignorable)
    parameters = Parameters({}, {})
    for parameter in table:
        if not parameter.belongs_to(share):
            pass
        elif parameter.columns is not None:
            parameters.matrices[parameter.name] = _packed(parameter, source, ops, device, precision, share)
        else:
            vector = _read(parameter, source, share).to(device).float()
            parameters.vectors[parameter.name] = vector + parameter.added if parameter.added else vector
        progress(parameter.rows * (parameter.columns or 1))
    return parameters
