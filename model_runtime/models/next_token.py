"""DeepSeek-V3's layer for multi-token prediction (arXiv 2412.19437, section 2.2), which drafts for the model. Made by
`draft.py`, run by the runner in steps of a draft model, engine process.

Its row at position i takes the output of the model's final norm there and the embedding of token i + 1, and predicts
token i + 2. A further token is drafted by the same layer from its own output in place of the norm's, which is kept by
slot like keys and values. Embedding and output matrix are the model's. Ranks that share layers have shares of this one
too, and each keeps all outputs.

Legend: T tokens of the step, R rows whose logits are wanted, S slots, C hidden size, V vocabulary.
"""

import torch
from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.batch import Batch
from model_runtime.caches import Caches
from model_runtime.models.decoder import Decoder
from model_runtime.models.layer import Layer, layer_table, wide_norm_table
from model_runtime.weights.table import Parameter, Parameters, Slot, linear_table

SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the model's own matrices that files have beside the layer."""


def next_token_prefix(config: ModelConfig) -> str:
    """What the checkpoint's keys of the layer begin with."""
    return f"model.layers.{config.num_layers}."


def next_token_table(config: ModelConfig) -> list[Parameter]:
    """Every parameter of the layer, in the order in which it is loaded."""
    prefix, size = next_token_prefix(config), config.hidden_size
    norms = [wide_norm_table(config, name, prefix + name) for name in ("enorm", "hnorm", "shared_head.norm")]
    joined = linear_table("eh_proj", (Slot(f"{prefix}eh_proj", size),), 2 * size, bias=False)
    return [*norms, *joined, *layer_table(config, config.num_layers)]


class NextTokenLayer:
    """Drafts for `decoder`, from what its final norm gave."""

    def __init__(self, decoder: Decoder, parameters: Parameters, normed_SC: Tensor) -> None:
        self._decoder, self._normed_SC = decoder, normed_SC
        self._layer = Layer(decoder.own, decoder.config.num_layers, parameters, decoder.collectives, decoder.exchange)
        self._token_norm_C, self._model_norm_C = parameters.vectors["enorm"], parameters.vectors["hnorm"]
        self._head_norm_C = parameters.vectors["shared_head.norm"]
        self._joined = parameters.linear("eh_proj")

    def forward(self, batch: Batch, kv: Caches) -> Tensor:
        """[T, C]. The batch has at each position the token that follows there."""
        x_TC = self._entering(batch)
        batch, rope = self._decoder.rotations.of_step(batch)
        return self._layer.forward(self._decoder.ops, x_TC, rope, batch, kv[0])

    def _entering(self, batch: Batch) -> Tensor:
        """[T, C]"""
        tokens_TC = self._decoder.token_embeddings(batch.token_ids_T).to(self._decoder.dtype)
        model_TC = self._normed_SC.index_select(0, batch.slots_T)
        normed = [self._norm(tokens_TC, self._token_norm_C), self._norm(model_TC, self._model_norm_C)]
        return self._decoder.ops.linear(torch.cat(normed, dim=1), self._joined.weight, None)

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] float32."""
        return self._decoder.output(self._norm(hidden_RC, self._head_norm_C))

    def _norm(self, x_TC: Tensor, weight_C: Tensor) -> Tensor:
        return self._decoder.ops.rms_norm(x_TC, weight_C, self._decoder.config.rms_norm_eps)
