"""The transformer block that all image towers share.

Called by the towers beside it. Engine and worker processes.

Legend: T tokens, C hidden size, I intermediate size, H heads, D head width.
"""

from torch import Tensor
from torch.nn.functional import rms_norm

from vision.encoder.attention import Attend
from vision.encoder.parameters import Parameters
from vision.encoder.rope2d import Rope, rotate
from vision.tower_config import BlockConfig

QK_NORM_EPS = 1e-6


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x)). Holds references to its weights, keeps no state."""

    def __init__(self, config: BlockConfig, layer: int, parameters: Parameters) -> None:
        self.config, self.name, self.parameters = config, f"layers.{layer}", parameters

    def _attention(self, x_TC: Tensor, attend: Attend, rope: Rope | None) -> Tensor:
        config, parameters = self.config, self.parameters
        q_TC, k_TC, v_TC = parameters.linear(x_TC, f"{self.name}.qkv").chunk(3, dim=-1)
        if config.qk_norm:
            q_TC = rms_norm(q_TC, q_TC.shape[1:], parameters.vectors[f"{self.name}.q_norm"], QK_NORM_EPS)
            k_TC = rms_norm(k_TC, k_TC.shape[1:], parameters.vectors[f"{self.name}.k_norm"], QK_NORM_EPS)
        q_THD, k_THD, v_THD = (x.reshape(-1, config.num_heads, config.head_dim) for x in (q_TC, k_TC, v_TC))
        if rope is not None:
            q_THD, k_THD = rotate(q_THD, rope), rotate(k_THD, rope)
        return parameters.linear(attend(q_THD, k_THD, v_THD).flatten(1), f"{self.name}.out")

    def _mlp(self, x_TC: Tensor) -> Tensor:
        activation = self.config.activation
        hidden = self.parameters.linear(x_TC, f"{self.name}.mlp_in")
        if self.config.gated:
            gate_TI, up_TI = hidden.chunk(2, dim=-1)
            hidden_TI = self.parameters.activate(gate_TI, activation) * up_TI
        else:
            hidden_TI = self.parameters.activate(hidden, activation)
        return self.parameters.linear(hidden_TI, f"{self.name}.mlp_out")

    def _branch(self, x_TC: Tensor, number: int) -> Tensor:
        return x_TC * self.parameters.vectors[f"{self.name}.scale{number}"] if self.config.layer_scale else x_TC

    def forward(self, x_TC: Tensor, attend: Attend, rope: Rope | None) -> Tensor:
        """[T, C] -> [T, C]."""
        norm, eps = self.config.norm, self.config.norm_eps
        normed_TC = self.parameters.normed(x_TC, f"{self.name}.norm1", norm, eps)
        x_TC = x_TC + self._branch(self._attention(normed_TC, attend, rope), 1)
        normed_TC = self.parameters.normed(x_TC, f"{self.name}.norm2", norm, eps)
        return x_TC + self._branch(self._mlp(normed_TC), 2)
