"""How weight tables are declared: which checkpoint keys fill which parameter of a decoder.

The tables stand beside the blocks in `model_runtime/blocks/` and `model_runtime/models/decoder.py`; the loader
(`weights/load.py`) fills them, in the engine process. Keys are those of Hugging Face's safetensors files; other
formats translate their own names to these.
"""

from dataclasses import dataclass

from torch import Tensor

from model_runtime.ops.registry import Linear, PackedWeight


@dataclass(frozen=True, slots=True)
class Slot:
    """One checkpoint tensor, and how many rows of the parameter it fills."""

    key: str
    rows: int


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

    @property
    def rows(self) -> int:
        """N."""
        return sum(slot.rows for slot in self.slots)

    def slot_shape(self, slot: Slot) -> tuple[int, ...]:
        """What the checkpoint must hold for one of the slots."""
        return (slot.rows,) if self.columns is None else (slot.rows, self.columns)


def linear_table(name: str, slots: tuple[Slot, ...], columns: int, bias: bool) -> list[Parameter]:
    """The weight, and the bias if there is one, of a linear layer; slot keys lack the ending .weight or .bias."""
    endings = [("weight", columns), ("bias", None)] if bias else [("weight", columns)]
    return [
        Parameter(
            name=f"{name}.{ending}",
            slots=tuple(Slot(f"{slot.key}.{ending}", slot.rows) for slot in slots),
            columns=width,
        )
        for ending, width in endings
    ]


def norm_table(name: str, key: str, width: int, *, less_one: bool) -> Parameter:
    """The weight of a norm, which the checkpoint holds under `key`.weight; less 1 if so said."""
    return Parameter(name=name, slots=(Slot(f"{key}.weight", width),), added=1.0 if less_one else 0.0)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The filled parameters of a decoder, by name."""

    matrices: dict[str, PackedWeight]
    vectors: dict[str, Tensor]
    """float32."""

    def linear(self, name: str) -> Linear:
        """The linear layer that `linear_table` declared under this name."""
        return Linear(self.matrices[f"{name}.weight"], self.vectors.get(f"{name}.bias"))

    @property
    def integer_rows(self) -> bool:
        """Whether rows are quantised for products with one of the matrices."""
        return any(matrix.integer_rows for matrix in self.matrices.values())

    @property
    def num_bytes(self) -> int:
        """Memory that all parameters take."""
        vectors = sum(vector.numel() * vector.element_size() for vector in self.vectors.values())
        return vectors + sum(matrix.num_bytes for matrix in self.matrices.values())
