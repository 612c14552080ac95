"""The way to experts that work on shorter vectors than hidden states, and back, with its weight table (Nemotron-H, and
with a norm Kimi K3, arXiv 2607.24653). Used by `moe.py`, engine and worker processes.

Legend: T tokens, C hidden size, L length of the vectors that experts take and give.
"""

from dataclasses import replace

from torch import Tensor

from model_runtime.architecture import Experts, ModelConfig
from model_runtime.ops.registry import Ops
from model_runtime.parallel import Collectives
from model_runtime.weights.table import Parameter, Parameters, Slot, linear_table, norm_table


def narrow_table(config: ModelConfig, experts: Experts, name: str, key: str) -> list[Parameter]:
    """The parameters under `name` and the checkpoint keys under `key` that fill them; none where experts take hidden
    states. All ranks that share layers have all, but the way back, which the first one alone adds to their sum."""
    if not (width := experts.hidden_size):
        return []
    down, up = Slot(f"{key}.routed_expert_down_proj", width), Slot(f"{key}.routed_expert_up_proj", config.hidden_size)
    table = linear_table(f"{name}.narrow", (down,), config.hidden_size, bias=False)
    if experts.result_norm:
        table.append(norm_table(f"{name}.narrow_norm", f"{key}.routed_expert_norm", width, less_one=False))
    return table + [replace(part, only_first=True) for part in linear_table(f"{name}.widen", (up,), width, bias=False)]


class Narrow:
    """Around the experts of a layer."""

    def __init__(self, config: ModelConfig, name: str, parameters: Parameters, collectives: Collectives) -> None:
        self._collectives, self._eps = collectives, config.rms_norm_eps
        self._narrow = parameters.matrices[f"{name}.narrow.weight"]
        self._norm_L = parameters.vectors.get(f"{name}.narrow_norm")
        self._widen = parameters.matrices.get(f"{name}.widen.weight")

    def enter(self, ops: Ops, x_TC: Tensor) -> Tensor:
        """[T, L]"""
        return ops.linear(x_TC, self._narrow, None)

    def leave(self, ops: Ops, sum_TL: Tensor, out_TC: Tensor) -> None:
        """Add what is made of this rank's part of the experts' weighted sum; may change that. A norm needs the whole
        sum, so ranks wait for each other here."""
        self._collectives.all_reduce(sum_TL)
        if self._widen is not None:
            normed_TL = sum_TL if self._norm_L is None else ops.rms_norm(sum_TL, self._norm_L, self._eps)
            out_TC += ops.linear(normed_TL, self._widen, None)
