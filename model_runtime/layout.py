"""The mesh of ranks that compute one model, and a rank's place in it. Supervisor, engine process and followers; this
module does not import torch.

Ranks count along the tensor dimension first, then context, then pipeline. Ranks that differ in one dimension alone are
a group: they share layers (tensor), sequences (context), or hand on hidden states (pipeline).
"""

from dataclasses import dataclass
from typing import Literal

from model_runtime.config import RuntimeConfig

Dimension = Literal["tensor", "context", "pipeline"]
DIMENSIONS: tuple[Dimension, ...] = ("tensor", "context", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the mesh and one rank of it."""

    rank: int = 0
    tensor_size: int = 1
    """Ranks that share each layer."""
    context_size: int = 1
    """Ranks that share each sequence."""
    pipeline_size: int = 1
    """Stages, each with some of the layers."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the rule."""
        if min(self.sizes) < 1:
            raise ValueError("tensor_size, context_size and pipeline_size must be at least 1")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be within 0..{self.size - 1}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of DIMENSIONS."""
        return self.tensor_size, self.context_size, self.pipeline_size

    @property
    def size(self) -> int:
        """All ranks."""
        return self.tensor_size * self.context_size * self.pipeline_size

    @property
    def place(self) -> tuple[int, ...]:
        """Along each of DIMENSIONS."""
        tensor, context = self.tensor_size, self.context_size
        return self.rank % tensor, self.rank // tensor % context, self.rank // (tensor * context)

    @property
    def stage(self) -> int:
        """Which layers this rank has."""
        return self.place[DIMENSIONS.index("pipeline")]

    def groups(self, dimension: Dimension) -> list[list[int]]:
        """All groups of a dimension, each with its ranks in order."""
        index = DIMENSIONS.index(dimension)
        by_others: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = Layout(
                rank=rank,
                tensor_size=self.tensor_size,
                context_size=self.context_size,
                pipeline_size=self.pipeline_size,
            ).place
            by_others.setdefault((*place[:index], *place[index + 1 :]), []).append(rank)
        return list(by_others.values())

    @property
    def areas(self) -> list[list[int]]:
        """Every group that has more than one rank, in the order of their areas in shared memory."""
        return [group for dimension in DIMENSIONS for group in self.groups(dimension) if len(group) > 1]


def layout_of(runtime: RuntimeConfig, rank: int = 0) -> Layout:
    """As configured."""
    return Layout(
        rank=rank,
        tensor_size=runtime.tensor_parallel_size,
        context_size=runtime.context_parallel_size,
        pipeline_size=runtime.pipeline_parallel_size,
    )
