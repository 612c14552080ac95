"""down(relu(up(x)) ** 2).

Legend: T tokens, C hidden size, F intermediate size.
"""

from torch import Tensor

from model_runtime.family_package import ModelConfig, Ops, OwnFeedForward, Parameter, Parameters, Slot, linear_table


def table(config: ModelConfig, name: str, key: str) -> list[Parameter]:
    """The parameters under `name`, and the keys of the file that fill them. Ranks have different rows of the first
    matrix and the same columns of the second."""
    width, size = config.intermediate_size, config.hidden_size
    up, down = Slot(f"{key}.up_proj", width, "feed_forward"), Slot(f"{key}.down_proj", size)
    return [
        *linear_table(f"{name}.up", (up,), size, config.mlp_bias),
        *linear_table(f"{name}.down", (down,), width, config.mlp_bias, "feed_forward"),
    ]


class SquaredRelu:
    """The block of one layer."""

    def __init__(self, config: ModelConfig, name: str, parameters: Parameters) -> None:
        self.up, self.down = parameters.linear(f"{name}.up"), parameters.linear(f"{name}.down")

    def forward(self, ops: Ops, x_TC: Tensor) -> Tensor:
        """[T, C] -> [T, C]."""
        wide_TF = ops.linear(x_TC, self.up.weight, self.up.bias)
        return ops.linear(wide_TF.relu_().square_(), self.down.weight, self.down.bias)


OWN = OwnFeedForward(table=table, build=SquaredRelu, floats=lambda config: config.intermediate_size)
