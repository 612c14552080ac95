"""Tensors that a config.json promises, where there are no files: shapes and types alone. Used by `opening.py`.

A file without a type is taken for one of bfloat16, as nearly all that are published.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from model_runtime.matrix_scheme import Quantization
from model_runtime.quantized import QuantizedFormat, QuantizedMatrix
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.grids import EXPANDED, format_of
from model_runtime.weights.source import FLOATS, Index, TensorSource
from model_runtime.weights.table import Parameter
from vision.tower_config import VisionTowerConfig
from vision.weights import vision_table


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """A StoredTensor of which there are no numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    format: QuantizedFormat | None = None

    @property
    def file(self) -> str:
        """What declares it."""
        return "config.json"

    def read_quantized(self, index: Index) -> QuantizedMatrix:
        """Never called."""
        _refuse()

    def read_into(self, index: Index, target: Tensor) -> None:
        """Never called."""
        _refuse()


def _refuse() -> NoReturn:
    raise AssertionError("a config.json has no numbers to read")


def declared_dtype(config: Mapping[str, object]) -> torch.dtype:
    """That a config.json names, in its text_config or outside. Raises CheckpointError for one that is not supported."""
    text = config.get("text_config")
    places = [text, config] if isinstance(text, Mapping) else [config]
    named = [place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key) is not None]
    if not named:
        return torch.bfloat16
    known = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
    name = str(named[0]).removeprefix("torch.")
    if name not in known:
        raise CheckpointError(f"config.json: dtype {name!r} is not supported; {', '.join(known)} are")
    return known[name]


def declared_text(
    table: Iterable[Parameter], dtype: torch.dtype, quantization: Quantization | None, renamed: Mapping[str, str]
) -> TensorSource:
    """Of a decoder with this table, all of one type but what is quantised. Routers, embedding and output matrix are
    not, whether or not a file says so. `renamed` is the family's, by whose names files say what is quantised."""
    found: dict[str, DeclaredTensor] = {}
    originals = {plain: original for original, plain in renamed.items()}
    for parameter in table:
        for slot in parameter.slots:
            shape = parameter.slot_shape(slot)
            is_linear = len(shape) == 2 and parameter.name not in ("embedding", "head") and parameter.fewest_bits < 32
            module = slot.key.removesuffix(".weight")
            spelled = ".".join(originals.get(part, part) for part in module.split("."))
            scheme = quantization.of(module, spelled) if quantization and is_linear else None
            if scheme is None:
                found[slot.key] = DeclaredTensor(shape, dtype)
            else:
                found[slot.key] = DeclaredTensor(shape, EXPANDED, format_of(scheme, shape[1]))
    return found


def declared_vision(tower: VisionTowerConfig, dtype: torch.dtype) -> TensorSource:
    """Of a tower with its projector."""
    return {key: DeclaredTensor(parameter.shape, dtype) for parameter in vision_table(tower) for key in parameter.keys}
