"""Fills a decoder's weight table from a checkpoint: every key used once, every parameter filled once, or an error that
names the keys. Called by `checkpoint.py`, engine and worker processes.

Memory above the finished parameters is one parameter in the checkpoint's storage type and one tensor of the file.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model_runtime.ops.registry import Ops
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


def _read(parameter: Parameter, source: TensorSource) -> Tensor:
    """All slots stacked, in the widest storage type among them."""
    dtype = source.dtype(parameter.slots[0].key)
    for slot in parameter.slots[1:]:
        dtype = torch.promote_types(dtype, source.dtype(slot.key))
    shape = (parameter.rows,) if parameter.columns is None else (parameter.rows, parameter.columns)
    stacked = torch.empty(shape, dtype=dtype)
    start = 0
    for slot in parameter.slots:
        source.read_into(slot.key, stacked[start : start + slot.rows])
        start += slot.rows
    if not torch.isfinite(stacked.sum(dtype=torch.float32)):
        raise CheckpointError(f"NaN or infinite weights in {', '.join(slot.key for slot in parameter.slots)}")
    return stacked


def load_parameters(
    table: list[Parameter],
    source: TensorSource,
    ops: Ops,
    device: torch.device,
    ignorable: Callable[[str], bool],
    progress: Callable[[int], None],
) -> Parameters:
    """Read, stack and pack every parameter; `progress` is told how many numbers each one has.

    Matrices are packed in their storage type, vectors become float32. Raises CheckpointError, before anything is read
    where the keys or shapes are wrong.
    """
    check_keys(table, source, ignorable)
    parameters = Parameters({}, {})
    for parameter in table:
        stacked = _read(parameter, source).to(device)
        if parameter.columns is None:
            vector = stacked.float()
            parameters.vectors[parameter.name] = vector + parameter.added if parameter.added else vector
        else:
            parameters.matrices[parameter.name] = ops.pack(stacked)
        progress(stacked.numel())
    return parameters
