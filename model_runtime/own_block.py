"""A feed-forward block that a package brings for its family of models (`models/packages.py`), in place of the gated
one. Part of the architecture, made by the layer, engine and worker processes; does not import torch.

Legend: T tokens, C hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from model_runtime.architecture import ModelConfig
    from model_runtime.ops.registry import Ops
    from model_runtime.weights.table import Parameter, Parameters


class FeedForwardBlock(Protocol):
    """Holds weights, keeps no state. What it makes of a token hangs on the token's own row alone, bit for bit."""

    def forward(self, ops: "Ops", x_TC: "Tensor") -> "Tensor":
        """[T, C] -> [T, C], a new tensor; of ranks that have parts of it, a summand of the whole."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFeedForward:
    """How such a block is made."""

    package: str = ""
    """Its name and version, filled in when it is loaded; ranks compare what this object prints as."""
    table: "Callable[[ModelConfig, str, str], list[Parameter]]" = field(repr=False)
    """(architecture, name, key) -> the parameters under `name`, and the checkpoint's keys under `key` that fill them.
    Every matrix is cut among ranks, by the axis feed_forward: what ranks make is added up."""
    build: "Callable[[ModelConfig, str, Parameters], FeedForwardBlock]" = field(repr=False)
    """(architecture as wide as the rank's part, name, parameters) -> the block."""
    floats: "Callable[[ModelConfig], int]" = field(repr=False)
    """The most float32 numbers that a token takes at once while the block runs, beside its row and the result."""
