"""Multi-head latent attention with its weight table (DeepSeek-V2, arXiv 2405.04434, section 2.1). Called by
`mixer.py`, engine and worker processes.

The cache has the latent vectors themselves, one row a token for all heads, and attention works in their space: a query
is taken there by its head's part of the matrix that makes keys, and the mixed latents become the head's values after
the softmax. So a token takes L + R numbers, however many heads there are.

Legend: T tokens, C hidden size, H heads, D channels of a query or key head, R of them shared by all heads, P = D - R,
V channels of a value head, Q query rank, L latent rank, X = L + R.
"""

from torch import Tensor

from model_runtime.architecture import LatentAttention, ModelConfig
from model_runtime.batch import Batch
from model_runtime.latent_store import LatentLayer
from model_runtime.ops.registry import Linear, Ops, RopeTable
from model_runtime.weights.table import Parameter, Parameters, Slot, linear_table, norm_table

NORM_EPS = 1e-6
"""Of the norms of the short vectors, whatever the model's other norms have."""


def latent_attention_table(config: ModelConfig, name: str, key: str) -> list[Parameter]:
    """The parameters under `name` and the checkpoint keys under `key` that fill them."""
    latent, heads = _latent(config), config.num_heads
    table = _query_table(config, name, key)
    down = (Slot(f"{key}.kv_a_proj_with_mqa", latent.row_width),)
    table += linear_table(f"{name}.latent_down", down, config.hidden_size, latent.bias)
    table.append(norm_table(f"{name}.latent_norm", f"{key}.kv_a_layernorm", latent.latent_rank, less_one=False))
    plain = config.head_dim - latent.shared_dim
    table += _head_table(f"{name}.key_up", Slot(f"{key}.k_b_proj.weight", heads * latent.latent_rank, "heads"), plain)
    values = Slot(f"{key}.v_b_proj.weight", heads * latent.value_dim, "heads")
    table += _head_table(f"{name}.value_up", values, latent.latent_rank)
    if latent.output_gate:
        gate = (Slot(f"{key}.g_proj", heads * latent.value_dim, "heads"),)
        table += linear_table(f"{name}.gate", gate, config.hidden_size, bias=False)
    output = (Slot(f"{key}.o_proj", config.hidden_size),)
    return table + linear_table(f"{name}.output", output, heads * latent.value_dim, latent.bias, "heads")


def _head_table(name: str, slot: Slot, columns: int) -> list[Parameter]:
    """A matrix for each head, one below the other; kept as floats, since queries and values meet them as they are."""
    return [Parameter(name=name, slots=(slot,), columns=columns, fewest_bits=32)]


def _query_table(config: ModelConfig, name: str, key: str) -> list[Parameter]:
    latent, rows = _latent(config), config.num_heads * config.head_dim
    if not latent.query_rank:
        return linear_table(f"{name}.query_up", (Slot(f"{key}.q_proj", rows, "heads"),), config.hidden_size, bias=False)
    down = (Slot(f"{key}.q_a_proj", latent.query_rank),)
    return [
        *linear_table(f"{name}.query_down", down, config.hidden_size, latent.bias),
        norm_table(f"{name}.query_norm", f"{key}.q_a_layernorm", latent.query_rank, less_one=False),
        *linear_table(f"{name}.query_up", (Slot(f"{key}.q_b_proj", rows, "heads"),), latent.query_rank, bias=False),
    ]


class LatentAttentionBlock:
    """Causal attention over the sequence's own cached latent vectors."""

    def __init__(self, config: ModelConfig, name: str, parameters: Parameters) -> None:
        self.latent, self.num_heads, self.head_dim = _latent(config), config.num_heads, config.head_dim
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.query_down: tuple[Linear, Tensor] | None = None
        """With the weight [Q] of the norm that follows."""
        if self.latent.query_rank:
            norm_Q = parameters.vectors[f"{name}.query_norm"]
            self.query_down = (parameters.linear(f"{name}.query_down"), norm_Q)
        self.query_up = parameters.linear(f"{name}.query_up")
        self.latent_down = parameters.linear(f"{name}.latent_down")
        self.latent_norm_L = parameters.vectors[f"{name}.latent_norm"]
        self.key_up, self.value_up = (parameters.matrices[f"{name}.{part}"] for part in ("key_up", "value_up"))
        self.gate = parameters.linear(f"{name}.gate") if self.latent.output_gate else None
        self.output = parameters.linear(f"{name}.output")

    def forward(self, ops: Ops, x_TC: Tensor, rope: RopeTable, batch: Batch, kv: LatentLayer) -> Tensor:
        """[T, C] -> [T, C]; writes the step's rows to their slots in `kv`."""
        value_TX = self._values(ops, self._mixed(ops, x_TC, rope, batch, kv))
        if self.gate is not None:
            value_TX *= ops.activate(_linear(ops, x_TC, self.gate), "sigmoid")
        return _linear(ops, value_TX, self.output)

    def _mixed(self, ops: Ops, x_TC: Tensor, rope: RopeTable, batch: Batch, kv: LatentLayer) -> Tensor:
        """[T, H, L]: mixed latents."""
        query_THX = self._queries(ops, x_TC)
        ops.rope_and_cache_latent(query_THX, self._rows(ops, x_TC), rope, batch, kv)
        return ops.latent_attention(query_THX, kv, batch, self.scale)

    def _values(self, ops: Ops, mixed_THL: Tensor) -> Tensor:
        """[T, H V]"""
        value_THV = mixed_THL.new_empty(*mixed_THL.shape[:2], self.latent.value_dim)
        ops.linear_heads(mixed_THL, self.value_up, value_THV)
        return value_THV.flatten(1)

    def _queries(self, ops: Ops, x_TC: Tensor) -> Tensor:
        """[T, H, X]: the part that meets latents, taken to their space, and the part that meets the shared channels."""
        if self.query_down is not None:
            down, norm_Q = self.query_down
            x_TC = ops.rms_norm(_linear(ops, x_TC, down), norm_Q, NORM_EPS)
        made_THD = _linear(ops, x_TC, self.query_up).view(len(x_TC), self.num_heads, self.head_dim)
        rank, plain = self.latent.latent_rank, self.head_dim - self.latent.shared_dim
        query_THX = made_THD.new_empty(*made_THD.shape[:2], self.latent.row_width)
        ops.linear_heads(made_THD[..., :plain], self.key_up, query_THX[..., :rank])
        query_THX[..., rank:] = made_THD[..., plain:]
        return query_THX

    def _rows(self, ops: Ops, x_TC: Tensor) -> Tensor:
        """[T, X]: latents, normalised, and the channels of keys that all heads share."""
        row_TX, rank = _linear(ops, x_TC, self.latent_down), self.latent.latent_rank
        row_TX[:, :rank] = ops.rms_norm(row_TX[:, :rank].contiguous(), self.latent_norm_L, NORM_EPS)
        return row_TX


def _latent(config: ModelConfig) -> LatentAttention:
    assert config.latent is not None, "the architecture has no latent attention"
    return config.latent


def _linear(ops: Ops, x_TK: Tensor, linear: Linear) -> Tensor:
    return ops.linear(x_TK, linear.weight, linear.bias)
