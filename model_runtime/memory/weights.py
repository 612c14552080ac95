"""What the weights of a rank take, part by part, before they are loaded: of the tables that the loader fills, the forms
that it packs matrices from, and the sizes that operations give these. Called by `planning.py`.

Parameters that are alike in all but name and layer are counted together, so a checkpoint of 10^12 numbers takes no
time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from model_runtime.image_side import ImageSide
from model_runtime.memory.offload import LayerBytes, staged_bytes
from model_runtime.ops.registry import Ops
from model_runtime.quantized import RowBits, fewest_row_bits
from model_runtime.share import Share
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.load import Precision, matrix_form
from model_runtime.weights.source import TensorSource
from model_runtime.weights.table import Parameter
from vision.encoder.parameters import is_matrix
from vision.weights import vision_table

WeightPart = Literal["embedding", "attention", "mlp", "experts", "norms", "head", "vision tower", "projector"]

_Likeness = tuple[WeightPart, bool, tuple[object, ...], int | None, tuple[object, ...]]
"""What decides how much a parameter takes; the first two as in `WeightGroup`."""

META = torch.device("meta")
"""Tensors there have a size and no numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Parameters that are alike."""

    part: WeightPart
    alike: tuple[Parameter, ...]
    stand_for_all: bool
    """Whether each stands for those of all experts of its layer."""

    def of(self, share: Share) -> list[Parameter]:
        """Those that a rank has, or that stand for some that it has."""
        if self.stand_for_all and share.experts.count < share.experts.total:
            return [parameter for parameter in self.alike if parameter.is_in_stage(share)]
        return [parameter for parameter in self.alike if parameter.belongs_to(share)]

    def copies(self, share: Share) -> int:
        """That each of these stands for."""
        return share.experts.count if self.stand_for_all else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWeights:
    """Of a rank."""

    parts: Mapping[WeightPart, int]
    """Bytes; nothing for a part that it has not."""
    numbers: Mapping[WeightPart, int]
    """Numbers of matrices."""
    layers: Mapping[int, LayerBytes]
    """What could be left in host memory, by layer."""
    embedding: torch.dtype | None
    """The type of the embedding's floats; None: it is made of integers, or in another stage."""
    row_bits: RowBits
    """As in `Parameters`."""

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())


def part_of(parameter: Parameter) -> WeightPart:
    """By its name in the decoder's tables."""
    name = parameter.name
    if name in ("embedding", "head"):
        return "embedding" if name == "embedding" else "head"
    if ".experts." in name:
        return "experts"
    if parameter.columns is None and name.endswith("norm"):
        return "norms"
    return "mlp" if ".mlp." in name else "attention"


def weight_groups(table: Iterable[Parameter], source: TensorSource, *, one_expert: bool) -> list[WeightGroup]:
    """Of a table, in which with `one_expert` the first expert of a layer stands for all. Raises CheckpointError for
    keys that are missing."""
    found: dict[_Likeness, list[Parameter]] = {}
    for parameter in table:
        if missing := [slot.key for slot in parameter.slots if slot.key not in source]:
            raise CheckpointError(f"the checkpoint does not fit its architecture: missing is {missing[0]}")
        stored = tuple(
            (slot.rows, slot.split, source[slot.key].dtype, source[slot.key].format) for slot in parameter.slots
        )
        stands_for_all = one_expert and parameter.expert is not None
        how_cut = parameter.columns_split, parameter.only_first, parameter.fewest_bits
        key = (part_of(parameter), stands_for_all, stored, parameter.columns, how_cut)
        found.setdefault(key, []).append(parameter)
    return [WeightGroup(part=key[0], alike=tuple(alike), stand_for_all=key[1]) for key, alike in found.items()]


def planned_weights(
    groups: Iterable[WeightGroup], source: TensorSource, share: Share, how: Precision, ops: Ops
) -> PlannedWeights:
    """What a rank will have of a decoder."""
    parts: dict[WeightPart, int] = {}
    numbers: dict[WeightPart, int] = {}
    layers: dict[int, LayerBytes] = {}
    embedding: torch.dtype | None = None
    row_bits: set[RowBits] = set()
    for group in groups:
        own, copies = group.of(share), group.copies(share)
        if not (count := len(own) * copies):
            continue
        example = group.alike[0]
        if example.columns is None:
            rows = sum(part.stop - part.start for part in (slot.part(share) for slot in example.slots))
            parts[group.part] = parts.get(group.part, 0) + count * rows * torch.float32.itemsize
            continue
        form = matrix_form(example, source, share, how)
        packed = ops.empty_matrix(form, META)
        row_bits.add(packed.row_bits)
        if group.part == "embedding" and packed.quantized is None:
            embedding = packed.data.dtype
        parts[group.part] = parts.get(group.part, 0) + count * packed.num_bytes
        numbers[group.part] = numbers.get(group.part, 0) + count * form.num_rows * form.num_columns
        _add_to_layers(layers, own, copies, packed.num_bytes)
    fewest = fewest_row_bits(row_bits)
    return PlannedWeights(parts=parts, numbers=numbers, layers=layers, embedding=embedding, row_bits=fewest)


def _add_to_layers(layers: dict[int, LayerBytes], alike: Iterable[Parameter], copies: int, num_bytes: int) -> None:
    """Matrices of so many bytes, each so many times."""
    for parameter in alike:
        if (layer := parameter.matrix_of_layer) is not None:
            before = layers.get(layer, LayerBytes(0, 0))
            taken, staged = before.taken + copies * num_bytes, before.staged + copies * staged_bytes(num_bytes)
            layers[layer] = LayerBytes(taken, staged)


def vision_bytes(side: ImageSide) -> dict[WeightPart, int]:
    """Of tower and projector, of which every rank of the first stage has all."""
    parts: dict[WeightPart, int] = {}
    for parameter in vision_table(side.tower):
        if parameter.keys[0] not in side.source:
            raise CheckpointError(f"the image side of the checkpoint: missing is {parameter.keys[0]}")
        stored = torch.empty(parameter.shape, dtype=side.source[parameter.keys[0]].dtype, device=META)
        size = stored.element_size() if is_matrix(parameter.name, stored) else torch.float32.itemsize
        is_projector = parameter.name.startswith(("projector.", "deepstack.", "newline"))
        part: WeightPart = "projector" if is_projector else "vision tower"
        parts[part] = parts.get(part, 0) + stored.numel() * len(parameter.keys) * size
    return parts
