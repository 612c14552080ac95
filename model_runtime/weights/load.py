"""Fills a decoder's weight table from a checkpoint: every key used once, every parameter filled once, or an error that
names the keys. Called by `checkpoint.py`, engine and worker processes.

Memory above the finished parameters is a piece of one, of some 2^18 numbers, and what is made of it on the way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from model_runtime.config import ActivationDtype, Quantization, RuntimeConfig
from model_runtime.device import give_back_memory
from model_runtime.memory.budget import PlanError
from model_runtime.memory.offload import Offload
from model_runtime.offload import HOST, PlainCopies, StreamCopies, stage
from model_runtime.ops.registry import PANEL_ROWS, MatrixForm, Ops, PackedWeight
from model_runtime.quantized import BLOCK, FORMS, QuantizedFormat, QuantizedMatrix, RowBits
from model_runtime.share import Share
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.part import Part
from model_runtime.weights.source import TensorSource
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


ROW_BITS: Mapping[ActivationDtype, RowBits] = MappingProxyType({"auto": 16, "int8": 8, "float32": 0})
"""Of rows for products with matrices of integers, as configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How a decoder's matrices are kept and multiplied."""

    quantization: Quantization = "none"
    """Turn matrices of floats into integers."""
    row_bits: RowBits = 16
    """What rows are quantised to for products with matrices of integers; 0: not, and those are expanded to float32. 8
    is for integers of 8 bits."""

    @classmethod
    def of(cls, runtime: RuntimeConfig) -> "Precision":
        """As configured."""
        return cls(quantization=runtime.quantization, row_bits=ROW_BITS[runtime.activation_dtype])


EXACT = Precision(row_bits=0)
"""Every number as the checkpoint has it."""

EIGHT_BITS = "8-bit integers: quantization int8 makes them, Q8_0 of GGUF and int8 of compressed-tensors are some"
"""What rows of 8 bits are for, in the words of refusals."""
_TARGETS: Mapping[Quantization, Mapping[int, QuantizedFormat]] = MappingProxyType(
    {
        "none": {},
        "int8": {4: "q8_0", 8: "q8_0"},
        "int4": {4: "q4_0", 8: "q8_0"},
        "int4-g128": {4: "q4_0_128", 8: "q8_0"},
    }
)
"""The format that a matrix is turned into, by its fewest bits."""


def _target(part: Part, how: Precision, fewest_bits: int) -> QuantizedFormat | None:
    """What floats become. Columns that begin inside a block have groups of their own, of one block."""
    target = None if part.num_columns % BLOCK else _TARGETS[how.quantization].get(fewest_bits)
    if target is not None and part.columns.start % BLOCK:
        return FORMS[target].repeated or target
    return target


def _form(part: Part, how: Precision, fewest_bits: int) -> MatrixForm:
    """As the file has it, unless floats are to become integers. Raises PlanError for integers that rows of 8 bits do
    not suit."""
    target = _target(part, how, fewest_bits)
    if target is not None and not part.suits(target):
        target = FORMS[target].repeated or target
    expanded = MIXED if part.is_mixed and how.row_bits else part.dtype
    stored = part.format or target or expanded
    if how.row_bits == 8 and not isinstance(stored, torch.dtype) and stored != "q8_0":
        key = part.slots[0][0]
        raise PlanError(f"activation_dtype int8 is for {EIGHT_BITS}; {key} is {stored}: set activation_dtype to auto")
    return MatrixForm(part.num_rows, part.num_columns, stored, how.row_bits)


def check_rows(how: Precision, found: RowBits) -> None:
    """Raises PlanError where rows of 8 bits are asked for and, as `found` says, all matrices are floats."""
    if how.row_bits == 8 and not found:
        raise PlanError(f"activation_dtype int8 is for {EIGHT_BITS}; all matrices of this model are floats")


def matrix_form(parameter: Parameter, source: TensorSource, share: Share, how: Precision) -> MatrixForm:
    """What a rank's part of a matrix will be packed from."""
    return _form(Part(parameter, source, share), how, parameter.fewest_bits)


def _packed(part: Part, ops: Ops, device: torch.device, how: Precision, fewest_bits: int) -> PackedWeight:
    """A matrix, piece by piece: beside the packed one there is never more than a piece."""
    form, target = _form(part, how, fewest_bits), _target(part, how, fewest_bits)
    packed = ops.empty_matrix(form, device)
    step = max(PIECE // part.num_columns // PANEL_ROWS, 1) * PANEL_ROWS
    for start in range(0, part.num_rows, step):
        rows = slice(start, min(start + step, part.num_rows))
        if isinstance(form.stored, torch.dtype):
            piece: Tensor | QuantizedMatrix = part.floats(rows, form.stored)
        elif part.format is None:
            assert target is not None, "only floats that have a target become integers"
            piece = part.made_integers(rows, part.dtype, target, form.stored)
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
    offload: Offload | None = None,
) -> Parameters:
    """Read, stack and pack a rank's part of every parameter; `progress` is told how many numbers each one has, in all
    ranks together.

    Matrices are packed in their storage type unless `precision` says otherwise, vectors become float32; those of the
    layers of `offload` stay in host memory. Raises CheckpointError, before anything is read where the keys or shapes
    are wrong, PlanError where the host cannot keep them and as `_form` does; whatever is raised, the memory of what was
    loaded is given back.
    """
    check_keys(table, source, ignorable)
    parameters = Parameters({}, {})
    on_host = {} if offload is None else _on_host(table, share, offload)
    try:
        for parameter in table:
            if parameter.belongs_to(share):
                place = HOST if parameter.name in on_host else device
                _fill(parameters, parameter, Part(parameter, source, share), ops, place, precision)
            progress(parameter.numbers)
        if offload is not None:
            copies = StreamCopies(device) if device.type == "cuda" else PlainCopies()
            return replace(parameters, staging=stage(parameters.matrices, on_host, offload, device, copies))
    except BaseException:
        parameters.matrices.clear()
        parameters.vectors.clear()
        give_back_memory(device)
        raise
    return parameters


def _on_host(table: list[Parameter], share: Share, offload: Offload) -> dict[str, int]:
    """The matrices that stay in host memory, each with its layer."""
    own = ((parameter.name, parameter.matrix_of_layer) for parameter in table if parameter.belongs_to(share))
    return {name: layer for name, layer in own if layer is not None and layer in offload.layers}


def _fill(
    parameters: Parameters, parameter: Parameter, part: Part, ops: Ops, device: torch.device, precision: Precision
) -> None:
    if parameter.columns is not None:
        parameters.matrices[parameter.name] = _packed(part, ops, device, precision, parameter.fewest_bits)
        return
    vector = part.floats(slice(0, part.num_rows), part.dtype).to(device).float()
    parameters.vectors[parameter.name] = vector + parameter.added if parameter.added else vector
