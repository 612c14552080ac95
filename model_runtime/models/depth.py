"""Block attention residuals (Kimi K3, arXiv 2607.24653): what a block of a layer takes is no sum of all that came
before, but a mixture of sums, one for each group of earlier layers, weighed by a softmax over depth. Made by the
decoder in place of the usual layers, engine and worker processes.

A stream begins with the embedding. At the first layer of each group it is put into the bank, and a new one begins with
that layer's attention; other results of attention and feed-forward blocks are added to the stream. Each block takes the
mixture of the bank and the stream, and so does the last norm.

Ranks that share layers mix the same sums. Stages of a pipeline would have to hand on the bank, and do not.

Legend: T tokens, C hidden size, N sums that are mixed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.batch import Batch
from model_runtime.caches import Caches
from model_runtime.models.layer import Layer, wide_norm_table
from model_runtime.ops.registry import Ops, PackedWeight, RopeTable
from model_runtime.weights.table import Parameter, Parameters, Slot


def mixture_table(config: ModelConfig, name: str, key: str) -> list[Parameter]:
    """The parameters under `name` and the checkpoint keys under `key` that weigh the sums in one place."""
    score = Slot(f"{key}_proj.weight", 1)
    return [
        wide_norm_table(config, f"{name}.norm", f"{key}_norm"),
        Parameter(name=f"{name}.score", slots=(score,), columns=config.hidden_size, fewest_bits=32),
    ]


def layer_mixtures_table(config: ModelConfig, layer: int) -> list[Parameter]:
    """Those before the two blocks of a layer."""
    name, key = f"layers.{layer}", f"model.layers.{layer}"
    return [
        *mixture_table(config, f"{name}.attention_mixture", f"{key}.self_attention_res"),
        *mixture_table(config, f"{name}.mlp_mixture", f"{key}.mlp_res"),
    ]


class Mixture:
    """Weighs sums by how they score, each by itself."""

    def __init__(self, config: ModelConfig, name: str, parameters: Parameters) -> None:
        self._norm_C, self._eps = parameters.vectors[f"{name}.norm"], config.rms_norm_eps
        self._score: PackedWeight = parameters.matrices[f"{name}.score"]

    def forward(self, ops: Ops, sums: Sequence[Tensor]) -> Tensor:
        """[T, C] of N such, as they are."""
        scores = [ops.linear(ops.rms_norm(sum_TC, self._norm_C, self._eps), self._score, None) for sum_TC in sums]
        weight_TN = torch.cat(scores, dim=1).float().softmax(dim=1)
        mixed_TC = sums[0] * weight_TN[:, :1]
        for index, sum_TC in enumerate(sums[1:], start=1):
            mixed_TC += sum_TC * weight_TN[:, index : index + 1]
        return mixed_TC.to(sums[0].dtype)


class DepthLayers:
    """A `LayerStack` of layers that take mixtures."""

    def __init__(self, config: ModelConfig, ops: Ops, layers: Sequence[Layer], parameters: Parameters) -> None:
        self._ops, self._layers, self._group = ops, layers, config.depth_group
        names = [f"layers.{layer}" for layer in range(len(layers))]
        self._before_attention = [Mixture(config, f"{name}.attention_mixture", parameters) for name in names]
        self._before_mlp = [Mixture(config, f"{name}.mlp_mixture", parameters) for name in names]
        self._last = Mixture(config, "mixture", parameters)

    def run(self, x_TC: Tensor, layers: range, ropes: tuple[RopeTable, RopeTable], batch: Batch, kv: Caches) -> Tensor:
        """[T, C] -> [T, C]; from the first layer on."""
        assert layers.start == 0, "the bank of earlier layers is gone"
        ops, bank, stream_TC = self._ops, list[Tensor](), x_TC
        for index in layers:
            layer = self._layers[index]
            # nothing is in the bank before the first layer
            mixed_TC = self._before_attention[index].forward(ops, [*bank, stream_TC]) if bank else stream_TC
            attended_TC = layer.attended(ops, mixed_TC, ropes[layer.has_other_rope], batch, kv[index])
            if index % self._group == 0:
                bank.append(stream_TC)
                stream_TC = attended_TC
            else:
                stream_TC = stream_TC + attended_TC
            stream_TC = stream_TC + layer.fed(ops, self._before_mlp[index].forward(ops, [*bank, stream_TC]))
        return self._last.forward(ops, [*bank, stream_TC])
