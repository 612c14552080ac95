"""A layer of a decoder with its weight table, and how layers are run: one operation after the other, which defines what
they compute, or all of them in one compiled call with the same results. Called by the decoder, engine and workers.

Legend: T tokens of the step, C hidden size.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from torch import Tensor

from model_runtime.architecture import ModelConfig, NormPlaces
from model_runtime.batch import Batch
from model_runtime.blocks.attention import Attention
from model_runtime.blocks.expert_exchange import ExpertExchange
from model_runtime.blocks.mixer import Mixer, make_mixer, mix, mixer_table
from model_runtime.blocks.mlp import MLP, mlp_table
from model_runtime.blocks.moe import MixtureOfExperts, moe_table
from model_runtime.caches import Caches, LayerCache
from model_runtime.ops.registry import DenseLayer, LayerStack, Ops, RopeTable
from model_runtime.own_block import FeedForwardBlock
from model_runtime.parallel import Alone, Collectives
from model_runtime.weights.table import Parameter, Parameters, norm_table

NORMS: Mapping[NormPlaces, Mapping[str, str]] = MappingProxyType(
    {
        "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
        "after": {
            "attention_result_norm": "post_attention_layernorm",
            "mlp_result_norm": "post_feedforward_layernorm",
        },
        "around": {
            "attention_norm": "input_layernorm",
            "attention_result_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_result_norm": "post_feedforward_layernorm",
        },
        "parallel": {"attention_norm": "input_layernorm"},
    }
)
"""Norms of a layer and the checkpoint's names for them."""


def wide_norm_table(config: ModelConfig, name: str, key: str) -> Parameter:
    """The weight of a norm of hidden states."""
    return norm_table(name, key, config.hidden_size, less_one=config.norm_weights_less_one)


def layer_table(config: ModelConfig, layer: int, *, first_expert_only: bool = False) -> list[Parameter]:
    """The parameters of a layer, in the order in which they are loaded; as in `moe_table`, of one expert if so said."""
    config = config.of_layer(layer)
    name, key = f"layers.{layer}", f"model.layers.{layer}"
    norms = NORMS[config.norm_places]
    own = mlp_table if config.own_feed_forward is None else config.own_feed_forward.table
    feed_forward = partial(moe_table, only_first=first_expert_only) if _has_experts(config, layer) else own
    return [
        *(wide_norm_table(config, f"{name}.{norm}", f"{key}.{norm_key}") for norm, norm_key in norms.items()),
        *mixer_table(config, layer, f"{name}.attention", f"{key}.self_attn"),
        *feed_forward(config, f"{name}.mlp", f"{key}.mlp"),
    ]


def _has_experts(config: ModelConfig, layer: int) -> bool:
    return config.experts is not None and layer not in config.experts.dense_layers


class Layer:
    """x + attention(norm(x)), then x + mlp(norm(x)); the norms are where `NormPlaces` says."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        parameters: Parameters,
        collectives: Collectives,
        exchange: ExpertExchange | None = None,
    ) -> None:
        """`config` is as wide as this rank's part of the layer; `exchange` as in `MixtureOfExperts`."""
        self._collectives, config = collectives, config.of_layer(layer)
        name, vectors = f"layers.{layer}", parameters.vectors
        self.norm, self.eps = config.norm, config.rms_norm_eps
        self.parallel, self.residual_scale = config.norm_places == "parallel", config.residual_scale
        self.has_other_rope = config.has_other_rope(layer)
        self.attention_norm_C = vectors.get(f"{name}.attention_norm")
        self.attention: Mixer = make_mixer(config, layer, f"{name}.attention", parameters, collectives)
        self.attention_result_norm_C = vectors.get(f"{name}.attention_result_norm")
        self.mlp_norm_C = vectors.get(f"{name}.mlp_norm")
        self.mlp: MixtureOfExperts | MLP | FeedForwardBlock
        if _has_experts(config, layer):
            self.mlp = MixtureOfExperts(config, f"{name}.mlp", parameters, collectives, exchange)
        elif config.own_feed_forward is not None:
            self.mlp = config.own_feed_forward.build(config, f"{name}.mlp", parameters)
        else:
            self.mlp = MLP(config, f"{name}.mlp", parameters)
        self.mlp_result_norm_C = vectors.get(f"{name}.mlp_result_norm")

    def forward(self, ops: Ops, x_TC: Tensor, rope: RopeTable, batch: Batch, kv: LayerCache) -> Tensor:
        """[T, C] -> [T, C]; may change x_TC."""
        if not self.parallel:
            x_TC += self.attended(ops, x_TC, rope, batch, kv)
            x_TC += self.fed(ops, x_TC)
            return x_TC
        rows_TC = self._normed(ops, x_TC, self.attention_norm_C)
        x_TC += self._summed(ops, mix(self.attention, ops, rows_TC, rope, batch, kv), self.attention_result_norm_C)
        x_TC += self._summed(ops, self.mlp.forward(ops, rows_TC), self.mlp_result_norm_C)
        return x_TC

    def attended(self, ops: Ops, x_TC: Tensor, rope: RopeTable, batch: Batch, kv: LayerCache) -> Tensor:
        """[T, C]: what attention gives, to be added."""
        rows_TC = self._normed(ops, x_TC, self.attention_norm_C)
        return self._summed(ops, mix(self.attention, ops, rows_TC, rope, batch, kv), self.attention_result_norm_C)

    def fed(self, ops: Ops, x_TC: Tensor) -> Tensor:
        """[T, C]: what the feed-forward block gives, to be added."""
        rows_TC = self._normed(ops, x_TC, self.mlp_norm_C)
        return self._summed(ops, self.mlp.forward(ops, rows_TC), self.mlp_result_norm_C)

    def dense(self) -> DenseLayer | None:
        """The layer as data, if it is of the dense kind."""
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, Attention) or not isinstance(mlp, MLP) or not attention.is_plain:
            return None
        if mlp.activation == "situ":
            return None
        return DenseLayer(
            eps=self.eps,
            norm=self.norm,
            attention_norm_C=self.attention_norm_C,
            attention_result_norm_C=self.attention_result_norm_C,
            mlp_norm_C=self.mlp_norm_C,
            mlp_result_norm_C=self.mlp_result_norm_C,
            parallel=self.parallel,
            residual_scale=self.residual_scale,
            qkv=attention.qkv,
            head_norms=attention.norms,
            shape=attention.shape,
            scoring=attention.scoring,
            other_rope=self.has_other_rope,
            output=attention.output,
            changes=attention.changes,
            gate_up=mlp.gate_up,
            activation=mlp.activation,
            down=mlp.down,
        )

    def _summed(self, ops: Ops, result_TC: Tensor, weight_C: Tensor | None) -> Tensor:
        """What a block gives in all ranks together, normalised if it has a norm of its own."""
        self._collectives.all_reduce(result_TC)
        result_TC = self._normed(ops, result_TC, weight_C)
        return result_TC if self.residual_scale == 1.0 else result_TC.mul_(self.residual_scale)

    def _normed(self, ops: Ops, x_TC: Tensor, weight_C: Tensor | None) -> Tensor:
        """x itself where there is no norm."""
        if weight_C is None:
            return x_TC
        return (ops.rms_norm if self.norm == "rms" else ops.layer_norm)(x_TC, weight_C, self.eps)


class EagerLayers:
    """The definition of a `LayerStack`: one operation after the other."""

    def __init__(self, ops: Ops, layers: Sequence[Layer]) -> None:
        self._ops, self._layers = ops, layers

    def run(self, x_TC: Tensor, layers: range, ropes: tuple[RopeTable, RopeTable], batch: Batch, kv: Caches) -> Tensor:
        """[T, C] -> [T, C]; may change x_TC."""
        assert len(kv) == len(self._layers), f"{len(kv)} caches for {len(self._layers)} layers"
        for index in layers:
            layer = self._layers[index]
            x_TC = layer.forward(self._ops, x_TC, ropes[layer.has_other_rope], batch, kv[index])
        return x_TC


def layer_stack(ops: Ops, layers: Sequence[Layer], collectives: Collectives) -> LayerStack:
    """Compiled, if the layers are all dense and there is a way."""
    dense = [layer.dense() for layer in layers]
    every = [layer for layer in dense if layer is not None]
    program = ops.layer_program(every, collectives, Alone()) if len(every) == len(layers) else None
    return EagerLayers(ops, layers) if program is None else program
