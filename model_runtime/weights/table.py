"""How weight tables are declared: which checkpoint keys fill which parameter of a decoder, and how ranks divide it.

The tables stand beside the blocks in `model_runtime/blocks/` and `model_runtime/models/decoder.py`; the loader
(`weights/load.py`) fills them, in the engine process. Keys are those of Hugging Face's safetensors files; other
formats translate their own names to these.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from model_runtime.offload import Staging
from model_runtime.ops.registry import Linear, PackedWeight
from model_runtime.quantized import RowBits, fewest_row_bits
from model_runtime.share import Axis, Share


@dataclass(frozen=True, slots=True)
class Slot:
    """One checkpoint tensor, and how many rows of the parameter it fills."""

    key: str
    rows: int
    split: Axis | None = None
    """What its rows belong to, where each rank has some of them; None: every rank has all."""

    def part(self, share: Share) -> slice:
        """The rows that a rank has."""
        return slice(0, self.rows) if self.split is None else share.part(self.split).of(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A matrix [N, K] or a vector [N] of a decoder; N is the sum of its slots' rows, stacked in order."""

    name: str
    slots: tuple[Slot, ...]
    columns: int | None = None
    """K, or None for a vector."""
    added: float = 0.0
    """Added to every number of a vector once it is float32."""
    fewest_bits: int = 4
    """Of the integers that `--quantization` may turn a matrix into."""
    columns_split: Axis | None = None
    """As `Slot.split`, of columns; products with the parts of ranks are then summands of the whole."""
    only_first: bool = False
    """Rank 0 alone has it: it is added to such a sum."""
    expert: int | None = None
    """Which expert it belongs to: ranks may have some of them, and those wholly."""
    layer: int | None = None
    """It is where this layer is, of which ranks may have some; None: everywhere."""

    @property
    def rows(self) -> int:
        """N."""
        return sum(slot.rows for slot in self.slots)

    @property
    def numbers(self) -> int:
        """N times K, or N of a vector."""
        return self.rows * (1 if self.columns is None else self.columns)

    @property
    def matrix_of_layer(self) -> int | None:
        """The layer that it is a matrix of; None for vectors, and for what is before and behind the layers."""
        return self.layer if self.columns is not None and self.name.startswith("layers.") else None

    def is_in_stage(self, share: Share) -> bool:
        """Whether a rank's stage has it."""
        return self.layer is None or share.layers.start <= self.layer < share.layers.stop

    def belongs_to(self, share: Share) -> bool:
        """Whether a rank has a part of it."""
        if not self.is_in_stage(share):
            return False
        if self.expert is not None and share.experts.count < share.experts.total:
            return share.experts.start <= self.expert < share.experts.stop
        return share.rank == 0 or not self.only_first

    def columns_part(self, share: Share) -> slice:
        """The columns of a matrix that a rank has."""
        assert self.columns is not None, f"{self.name} is a vector"
        return slice(0, self.columns) if self.columns_split is None else share.part(self.columns_split).of(self.columns)

    def index(self, slot: Slot, share: Share) -> tuple[slice, ...]:
        """Where a rank's part of a slot's tensor is."""
        rows = slot.part(share)
        return (rows,) if self.columns is None else (rows, self.columns_part(share))

    def slot_shape(self, slot: Slot) -> tuple[int, ...]:
        """What the checkpoint must hold for one of the slots."""
        return (slot.rows,) if self.columns is None else (slot.rows, self.columns)


def linear_table(
    name: str, slots: tuple[Slot, ...], columns: int, bias: bool, columns_split: Axis | None = None
) -> list[Parameter]:
    """The weight, and the bias if there is one, of a linear layer; slot keys lack the ending .weight or .bias."""

    def ending_in(ending: str) -> tuple[Slot, ...]:
        return tuple(replace(slot, key=f"{slot.key}.{ending}") for slot in slots)

    table = [
        Parameter(name=f"{name}.weight", slots=ending_in("weight"), columns=columns, columns_split=columns_split),
    ]
    if bias:
        table.append(Parameter(name=f"{name}.bias", slots=ending_in("bias"), only_first=columns_split is not None))
    return table


def norm_table(name: str, key: str, width: int, *, less_one: bool, split: Axis | None = None) -> Parameter:
    """The weight of a norm, which the checkpoint holds under `key`.weight; less 1 if so said."""
    return Parameter(name=name, slots=(Slot(f"{key}.weight", width, split),), added=1.0 if less_one else 0.0)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The filled parameters of a decoder, by name."""

    matrices: dict[str, PackedWeight]
    vectors: dict[str, Tensor]
    """float32."""
    staging: Staging | None = None
    """Layers whose matrices are views of its buffers, and in host memory."""

    def linear(self, name: str) -> Linear:
        """The linear layer that `linear_table` declared under this name."""
        return Linear(self.matrices[f"{name}.weight"], self.vectors.get(f"{name}.bias"))

    @property
    def row_bits(self) -> RowBits:
        """The fewest that rows are quantised to for products with one of the matrices; 0: none are."""
        return fewest_row_bits(matrix.row_bits for matrix in self.matrices.values())

    @property
    def num_bytes(self) -> int:
        """Memory that all parameters take on the device."""
        vectors = sum(vector.numel() * vector.element_size() for vector in self.vectors.values())
        on_host = 0 if self.staging is None else self.staging.offload.saved_bytes
        return vectors + sum(matrix.num_bytes for matrix in self.matrices.values()) - on_host
