"""Multi-head latent attention with its weight table (DeepSeek-V2, arXiv 2405.04434, section 2.1). Called by the
decoder, engine and worker processes.

Computed in its expanded form: keys and values of every head are made from the latent vector of a token once and stored
in the ordinary paged cache, values with zeros up to the width of the keys. So attention is the plain kind, and a token
takes 2 H D numbers; a cache of the latent vectors alone, L + R numbers, needs an attention of its own.

In the checkpoint a head's rotated channels come last; here they come first, where `ops.rope_and_cache` rotates.

Legend: T tokens, C hidden size, H heads, D channels of a query or key head, R of them rotated, V channels of a value
head, Q query rank, L latent rank.
"""

from torch import Tensor

from model_runtime.architecture import LatentAttention, ModelConfig
from model_runtime.batch import Batch
from model_runtime.kv_store import KVLayer
from model_runtime.ops.registry import HeadShape, Linear, Ops, RopeTable, Scoring
from model_runtime.weights.table import Parameter, Parameters, Slot, linear_table, norm_table

NORM_EPS = 1e-6
"""Of the norms of the short vectors, whatever the model's other norms have."""


def latent_attention_table(config: ModelConfig, name: str, key: str) -> list[Parameter]:
    """The parameters under `name` and the checkpoint keys under `key` that fill them."""
    latent, heads, rotated = _latent(config), config.num_heads, config.rope.rotary_dim
    table = _query_table(config, name, key)
    down = (Slot(f"{key}.kv_a_proj_with_mqa", latent.latent_rank + rotated),)
    table += linear_table(f"{name}.latent_down", down, config.hidden_size, latent.bias)
    table.append(norm_table(f"{name}.latent_norm", f"{key}.kv_a_layernorm", latent.latent_rank, less_one=False))
    up = (Slot(f"{key}.kv_b_proj", heads * (config.head_dim - rotated + latent.value_dim), "heads"),)
    table += linear_table(f"{name}.latent_up", up, latent.latent_rank, bias=False)
    output = (Slot(f"{key}.o_proj", config.hidden_size),)
    return table + linear_table(f"{name}.output", output, heads * latent.value_dim, latent.bias, "heads")


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
    """Causal attention over the sequence's own cached keys, which are made from latent vectors."""

    def __init__(self, config: ModelConfig, name: str, parameters: Parameters) -> None:
        self.latent = _latent(config)
        self.scoring = Scoring(scale=config.attention_scale or config.head_dim**-0.5)
        self.rotated = config.rope.rotary_dim
        self.shape = HeadShape(num_heads=config.num_heads, num_kv_heads=config.num_heads, head_dim=config.head_dim)
        self.query_down: tuple[Linear, Tensor] | None = None
        """With the weight [Q] of the norm that follows."""
        if self.latent.query_rank:
            norm_Q = parameters.vectors[f"{name}.query_norm"]
            self.query_down = (parameters.linear(f"{name}.query_down"), norm_Q)
        self.query_up = parameters.linear(f"{name}.query_up")
        self.latent_down = parameters.linear(f"{name}.latent_down")
        self.latent_norm_L = parameters.vectors[f"{name}.latent_norm"]
        self.latent_up = parameters.linear(f"{name}.latent_up")
        self.output = parameters.linear(f"{name}.output")

    def forward(self, ops: Ops, x_TC: Tensor, rope: RopeTable, batch: Batch, kv: KVLayer) -> Tensor:
        """[T, C] -> [T, C]; writes the step's keys and values to their slots in `kv`."""
        mixed_TX = self._mixed(ops, x_TC, rope, batch, kv)
        mixed_THV = mixed_TX.view(-1, self.shape.num_heads, self.shape.head_dim)[..., : self.latent.value_dim]
        return _linear(ops, mixed_THV.flatten(1).contiguous(), self.output)

    def _mixed(self, ops: Ops, x_TC: Tensor, rope: RopeTable, batch: Batch, kv: KVLayer) -> Tensor:
        """[T, H D]: mixed values, zeros behind each head's."""
        num_heads, head_dim = self.shape.num_heads, self.shape.head_dim
        qkv_T3HD = x_TC.new_empty(x_TC.shape[0], 3 * num_heads, head_dim)
        self._fill_queries(ops, x_TC, qkv_T3HD[:, :num_heads])
        self._fill_keys_and_values(ops, x_TC, qkv_T3HD[:, num_heads : 2 * num_heads], qkv_T3HD[:, 2 * num_heads :])
        qkv_TE = qkv_T3HD.flatten(1)
        ops.rope_and_cache(qkv_TE, rope, batch, kv, self.shape)
        return ops.paged_attention(qkv_TE, kv, batch, self.shape, self.scoring)

    def _fill_queries(self, ops: Ops, x_TC: Tensor, query_THD: Tensor) -> None:
        if self.query_down is not None:
            down, norm_Q = self.query_down
            x_TC = ops.rms_norm(_linear(ops, x_TC, down), norm_Q, NORM_EPS)
        made_THD = _linear(ops, x_TC, self.query_up).view(query_THD.shape)
        plain = self.shape.head_dim - self.rotated
        query_THD[..., : self.rotated] = made_THD[..., plain:]
        query_THD[..., self.rotated :] = made_THD[..., :plain]

    def _fill_keys_and_values(self, ops: Ops, x_TC: Tensor, key_THD: Tensor, value_THD: Tensor) -> None:
        down_TX = _linear(ops, x_TC, self.latent_down)
        latent_TL, rotated_TR = down_TX[:, : -self.rotated], down_TX[:, -self.rotated :]
        normed_TL = ops.rms_norm(latent_TL.contiguous(), self.latent_norm_L, NORM_EPS)
        value_dim = self.latent.value_dim
        width = self.shape.head_dim - self.rotated + value_dim
        made_THX = _linear(ops, normed_TL, self.latent_up).view(-1, self.shape.num_heads, width)
        key_THD[..., : self.rotated] = rotated_TR[:, None]
        key_THD[..., self.rotated :] = made_THX[..., :-value_dim]
        value_THD[..., :value_dim] = made_THX[..., -value_dim:]
        value_THD[..., value_dim:] = 0


def _latent(config: ModelConfig) -> LatentAttention:
    assert config.latent is not None, "the architecture has no latent attention"
    return config.latent


def _linear(ops: Ops, x_TK: Tensor, linear: Linear) -> Tensor:
    return ops.linear(x_TK, linear.weight, linear.bias)
