"""Grouped-query attention with its weight table. Called by the decoder, engine and worker processes.

Legend: T tokens, C hidden size, H query heads, G key/value heads, D channels of a head, E = (H + 2 G) D.
"""

from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.batch import Batch
from model_runtime.kv_store import KVLayer
from model_runtime.ops.registry import HeadNorms, HeadShape, Linear, Ops, RopeTable
from model_runtime.weights.table import Parameter, Parameters, Slot, linear_table, norm_table


def attention_table(config: ModelConfig, name: str, key: str) -> list[Parameter]:
    """The parameters under `name` and the checkpoint keys under `key` that fill them; q, k and v are stacked."""
    query_rows, key_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = (
        Slot(f"{key}.q_proj", query_rows, "heads"),
        Slot(f"{key}.k_proj", key_rows, "kv_heads"),
        Slot(f"{key}.v_proj", key_rows, "kv_heads"),
    )
    output = (Slot(f"{key}.o_proj", config.hidden_size),)
    norms = [
        norm_table(f"{name}.{norm}", f"{key}.{norm}", config.head_dim, less_one=config.norm_weights_less_one)
        for norm in ("q_norm", "k_norm")
        if config.qk_norm
    ]
    return [
        *linear_table(f"{name}.qkv", qkv, config.hidden_size, config.qkv_bias),
        *norms,
        *linear_table(f"{name}.output", output, query_rows, config.output_bias, "heads"),
    ]


class Attention:
    """softmax(q k^T scale) v over the sequence's own cached keys, queries and keys rotated by position."""

    def __init__(self, config: ModelConfig, layer: int, name: str, parameters: Parameters) -> None:
        self.shape = HeadShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            absent_heads=config.absent_heads,
        )
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.window = config.sliding_windows[layer]
        self.qkv: Linear = parameters.linear(f"{name}.qkv")
        self.output: Linear = parameters.linear(f"{name}.output")
        self.norms: HeadNorms | None = None
        if config.qk_norm:
            vectors = parameters.vectors
            self.norms = HeadNorms(vectors[f"{name}.q_norm"], vectors[f"{name}.k_norm"], config.rms_norm_eps)

    def forward(self, ops: Ops, x_TC: Tensor, rope: RopeTable, batch: Batch, kv: KVLayer) -> Tensor:
        """[T, C] -> [T, C]; writes the step's keys and values to their slots in `kv`."""
        qkv_TE = ops.linear(x_TC, self.qkv.weight, self.qkv.bias)
        if self.norms is not None:
            ops.qk_norm(qkv_TE, self.norms.query_D, self.norms.key_D, self.norms.eps, self.shape)
        ops.rope_and_cache(qkv_TE, rope, batch, kv, self.shape)
        mixed_THD = ops.paged_attention(qkv_TE, kv, batch, self.shape, self.scale, self.window)
        return ops.linear(mixed_THD, self.output.weight, self.output.bias)
