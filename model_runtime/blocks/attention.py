"""Grouped-query attention with its weight table. Called by `mixer.py`, engine and worker processes.

Legend: T tokens, C hidden size, H query heads, G key/value heads, D channels of a head, E = (H + 2 G) D; W and X
channels of all heads of a rank.
"""

import torch
from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.batch import Batch
from model_runtime.blocks.adapter import adapter_table, add_changes, changes_of
from model_runtime.kv_store import KVLayer
from model_runtime.ops.registry import HeadNorms, HeadShape, Linear, Ops, RopeTable, Scoring
from model_runtime.parallel import Collectives
from model_runtime.share import Axis
from model_runtime.weights.table import Parameter, Parameters, Slot, linear_table, norm_table


def attention_table(config: ModelConfig, name: str, key: str) -> list[Parameter]:
    """The parameters under `name` and the checkpoint keys under `key` that fill them; q, k and v are stacked."""
    query_rows, key_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    value_dim = config.value_dim or config.head_dim
    qkv = (
        Slot(f"{key}.q_proj", query_rows * (2 if config.attention_gate else 1), "heads"),
        Slot(f"{key}.k_proj", key_rows, "kv_heads"),
        Slot(f"{key}.v_proj", config.num_kv_heads * value_dim, "kv_heads"),
    )
    output = (Slot(f"{key}.o_proj", config.hidden_size),)
    return [
        *linear_table(f"{name}.qkv", qkv, config.hidden_size, config.qkv_bias),
        *_norm_tables(config, name, key),
        *(Parameter(name=f"{name}.sinks", slots=(sinks,)) for sinks in _sinks(config, key)),
        *linear_table(f"{name}.output", output, config.num_heads * value_dim, config.output_bias, "heads"),
        *adapter_table(config, name, key),
    ]


def _sinks(config: ModelConfig, key: str) -> tuple[Slot, ...]:
    return (Slot(f"{key}.sinks", config.num_heads, "heads"),) if config.attention_sinks != "none" else ()


def _norm_tables(config: ModelConfig, name: str, key: str) -> list[Parameter]:
    """Of queries and keys."""
    axes: tuple[tuple[str, int, Axis], ...] = (
        ("q_norm", config.num_heads, "heads"),
        ("k_norm", config.num_kv_heads, "kv_heads"),
    )
    if config.qk_norm in ("none", "rotated"):
        return []
    whole, less_one = config.qk_norm == "row", config.norm_weights_less_one
    return [
        norm_table(
            f"{name}.{norm}",
            f"{key}.{norm}",
            heads * config.head_dim if whole else config.head_dim,
            less_one=less_one,
            split=axis if whole else None,
        )
        for norm, heads, axis in axes
    ]


class Attention:
    """softmax(q k^T scale) v over the sequence's own cached keys, queries and keys rotated by position."""

    def __init__(
        self, config: ModelConfig, layer: int, name: str, parameters: Parameters, collectives: Collectives
    ) -> None:
        self._collectives = collectives
        self.shape = HeadShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            absent_heads=config.absent_heads,
        )
        self.scoring = Scoring(
            scale=config.attention_scale or config.head_dim**-0.5,
            window=config.sliding_windows[layer],
            chunk=config.attention_chunks[layer] if config.attention_chunks else 0,
            softcap=config.attention_softcap,
            sinks_H=parameters.vectors.get(f"{name}.sinks"),
        )
        self.gated = config.attention_gate
        self.value_dim, self.value_scale = config.value_dim or config.head_dim, config.value_scale
        self.qkv: Linear = parameters.linear(f"{name}.qkv")
        self.output: Linear = parameters.linear(f"{name}.output")
        self.changes = changes_of(config, name, parameters)
        self.norms: HeadNorms | None = None
        self.norms_over_ranks = config.qk_norm == "row" and collectives.size > 1
        """Each rank has some of the heads that are normalised together."""
        if config.qk_norm == "rotated" and config.rope_of(layer).rotary_dim:
            ones_D = torch.ones(config.head_dim, device=self.qkv.weight.data.device)
            self.norms = HeadNorms(ones_D, ones_D, config.rms_norm_eps)
        elif config.qk_norm in ("head", "row"):
            vectors = parameters.vectors
            self.norms = HeadNorms(vectors[f"{name}.q_norm"], vectors[f"{name}.k_norm"], config.rms_norm_eps)

    @property
    def is_plain(self) -> bool:
        """Whether a layer program knows all that it does."""
        has_plain_values = self.value_dim == self.shape.head_dim and self.value_scale == 1.0
        return has_plain_values and not (self.norms_over_ranks or self.gated)

    def forward(self, ops: Ops, x_TC: Tensor, rope: RopeTable, batch: Batch, kv: KVLayer) -> Tensor:
        """[T, C] -> [T, C]; writes the step's keys and values to their slots in `kv`."""
        made_TX = ops.linear(x_TC, self.qkv.weight, self.qkv.bias)
        add_changes(ops, self.changes[0], x_TC, batch.adapted_A, made_TX)
        qkv_TE, gate_TX = self._apart(made_TX)
        if self.norms_over_ranks:
            self._normalise_with_other_ranks(qkv_TE)
        elif self.norms is not None:
            ops.qk_norm(qkv_TE, self.norms.query, self.norms.key, self.norms.eps, self.shape)
        ops.rope_and_cache(qkv_TE, rope, batch, kv, self.shape)
        mixed_TX = self._values(ops.paged_attention(qkv_TE, kv, batch, self.shape, self.scoring))
        if gate_TX is not None:
            mixed_TX *= ops.activate(gate_TX.contiguous(), "sigmoid")
        result_TC = ops.linear(mixed_TX, self.output.weight, self.output.bias)
        add_changes(ops, self.changes[1], mixed_TX, batch.adapted_A, result_TC)
        return result_TC

    def _apart(self, made_TX: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values [T, E], and gates [T, H D] if they stand behind each head's query."""
        if not self.gated:
            return self._widened(made_TX), None
        width = self.shape.num_heads * self.shape.head_dim
        pairs_TH2D = made_TX[:, : 2 * width].reshape(len(made_TX), -1, 2, self.shape.head_dim)
        query_TX, gate_TX = (part_THD.flatten(1) for part_THD in pairs_TH2D.unbind(2))
        return torch.cat((query_TX, made_TX[:, 2 * width :]), dim=1), gate_TX

    def _widened(self, made_TX: Tensor) -> Tensor:
        """[T, E]: values with zeros up to the width of keys."""
        if (missing := self.shape.head_dim - self.value_dim) == 0:
            return made_TX
        before = (self.shape.num_heads + self.shape.num_kv_heads) * self.shape.head_dim
        value_TGV = made_TX[:, before:].view(len(made_TX), -1, self.value_dim)
        return torch.cat((made_TX[:, :before], torch.nn.functional.pad(value_TGV, (0, missing)).flatten(1)), dim=1)

    def _values(self, mixed_TX: Tensor) -> Tensor:
        """[T, H V]: without these zeros, and scaled, which is the same here as before they are mixed."""
        if self.value_dim < self.shape.head_dim:
            mixed_TX = mixed_TX.view(len(mixed_TX), -1, self.shape.head_dim)[..., : self.value_dim].flatten(1)
        return mixed_TX if self.value_scale == 1.0 else mixed_TX.mul_(self.value_scale)

    def _normalise_with_other_ranks(self, qkv_TE: Tensor) -> None:
        """RMS norms of all heads of a token, of which this rank has some, in place."""
        norms, shape = self.norms, self.shape
        assert norms is not None, "the architecture has no norms of queries and keys"
        widths = [shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim]
        parts = torch.split(qkv_TE[:, : sum(widths)], widths, dim=1)
        # squares of queries and of keys, and in the last column how many numbers they are
        sums_2X = torch.stack([_squares(part_TW) for part_TW in parts])
        self._collectives.all_reduce(sums_2X)
        for part_TW, weight_W, sums_X in zip(parts, (norms.query, norms.key), sums_2X, strict=True):
            factor_T1 = torch.rsqrt(sums_X[:-1, None] / sums_X[-1] + norms.eps)
            part_TW.copy_(part_TW.float() * factor_T1 * weight_W)


def _squares(part_TW: Tensor) -> Tensor:
    """[T + 1]: the sum of each row's squares, and last W."""
    sum_T = part_TW.float().square().sum(dim=1)
    return torch.cat((sum_T, sum_T.new_full((1,), part_TW.shape[1])))
