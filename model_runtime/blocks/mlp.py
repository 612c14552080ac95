"""The gated feed-forward block (SwiGLU and GeGLU, arXiv 2002.05202) with its weight table. Engine and worker processes.

Legend: T tokens, C hidden size, F intermediate size.
"""

from torch import Tensor

from model_runtime.architecture import GATE_BOUND, UP_BOUND, ModelConfig
from model_runtime.ops.registry import Linear, Ops
from model_runtime.share import Axis
from model_runtime.weights.table import Parameter, Parameters, Slot, linear_table


def mlp_table(config: ModelConfig, name: str, key: str, columns: Axis = "feed_forward") -> list[Parameter]:
    """The parameters under `name` and the checkpoint keys under `key` that fill them; gate and up are stacked. Ranks
    have different columns."""
    width = config.intermediate_size
    gate_up = (Slot(f"{key}.gate_proj", width, columns), Slot(f"{key}.up_proj", width, columns))
    down = (Slot(f"{key}.down_proj", config.hidden_size),)
    return [
        *linear_table(f"{name}.gate_up", gate_up, config.hidden_size, config.mlp_bias),
        *linear_table(f"{name}.down", down, width, config.mlp_bias, columns),
    ]


class MLP:
    """down(activation(gate(x)) * up(x)). SiTU (Kimi K3, arXiv 2607.24653) is GATE_BOUND tanh(gate / GATE_BOUND)
    sigmoid(gate) times UP_BOUND tanh(up / UP_BOUND)."""

    def __init__(self, config: ModelConfig, name: str, parameters: Parameters, clamp: float = 0.0) -> None:
        """`clamp` as in `Experts`."""
        self.activation, self.clamp = config.activation, clamp
        self.gate_up: Linear = parameters.linear(f"{name}.gate_up")
        self.down: Linear = parameters.linear(f"{name}.down")

    def forward(self, ops: Ops, x_TC: Tensor) -> Tensor:
        """[T, C] -> [T, C]."""
        gate_up_T2F = ops.linear(x_TC, self.gate_up.weight, self.gate_up.bias)
        return ops.linear(self._product(ops, gate_up_T2F), self.down.weight, self.down.bias)

    def _product(self, ops: Ops, gate_up_T2F: Tensor) -> Tensor:
        """[T, F]"""
        if self.activation == "situ":
            return _situ(ops, *gate_up_T2F.chunk(2, dim=1))
        if not self.clamp:
            return (ops.silu_mul if self.activation == "silu" else ops.gelu_tanh_mul)(gate_up_T2F)
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=1)
        gate_TF = ops.activate(gate_TF.clamp(max=self.clamp).contiguous(), "quick_gelu")
        return gate_TF.mul_(up_TF.clamp(-self.clamp, self.clamp) + 1)


def _situ(ops: Ops, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    bounded_TF = ops.activate((gate_TF / GATE_BOUND).contiguous(), "tanh").mul_(GATE_BOUND)
    bounded_TF *= ops.activate(gate_TF.contiguous(), "sigmoid")
    return bounded_TF.mul_(ops.activate((up_TF / UP_BOUND).contiguous(), "tanh")).mul_(UP_BOUND)
