"""A decoder-only language model assembled from blocks that its `ModelConfig` selects. Engine and worker processes.

Made by `checkpoint.load_model`, called by the runner once a step. Everything a step depends on is in the arguments.

Legend: T tokens of the step, R rows whose logits are wanted, C hidden size, V vocabulary.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from model_runtime.batch import Batch, ImageRows
from model_runtime.blocks.attention import Attention, attention_table
from model_runtime.blocks.mla import LatentAttentionBlock, latent_attention_table
from model_runtime.blocks.mlp import MLP, mlp_table
from model_runtime.blocks.moe import MixtureOfExperts, moe_table
from model_runtime.blocks.rope import Rotations, rope_table
from model_runtime.config import ModelConfig
from model_runtime.kv_store import KVLayer
from model_runtime.ops.registry import Ops, RopeTable
from model_runtime.weights.table import Parameter, Parameters, Slot, norm_table

TIED_HEAD_KEY = "lm_head.weight"
PRE_NORMS: Mapping[str, str] = MappingProxyType(
    {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
)
SANDWICH_NORMS: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "attention_result_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_result_norm": "post_feedforward_layernorm",
    }
)
"""Parameters of a layer and the checkpoint's names for them."""


def _norm(config: ModelConfig, name: str, key: str) -> Parameter:
    return norm_table(name, key, config.hidden_size, less_one=config.norm_weights_less_one)


def _layer_table(config: ModelConfig, layer: int) -> list[Parameter]:
    name, key = f"layers.{layer}", f"model.layers.{layer}"
    norms = SANDWICH_NORMS if config.sandwich_norms else PRE_NORMS
    attention = attention_table if config.latent is None else latent_attention_table
    feed_forward = moe_table if _has_experts(config, layer) else mlp_table
    return [
        *(_norm(config, f"{name}.{norm}", f"{key}.{norm_key}") for norm, norm_key in norms.items()),
        *attention(config, f"{name}.attention", f"{key}.self_attn"),
        *feed_forward(config, f"{name}.mlp", f"{key}.mlp"),
    ]


def _has_experts(config: ModelConfig, layer: int) -> bool:
    return config.experts is not None and layer >= config.experts.first_layer


def decoder_table(config: ModelConfig) -> list[Parameter]:
    """Every parameter of the decoder, in the order in which it is loaded."""
    embedding = Slot("model.embed_tokens.weight", config.vocab_size)
    table = [Parameter(name="embedding", slots=(embedding,), columns=config.hidden_size, fewest_bits=8)]
    for layer in range(config.num_layers):
        table += _layer_table(config, layer)
    table.append(_norm(config, "norm", "model.norm"))
    if not config.tie_word_embeddings:
        head = Slot(TIED_HEAD_KEY, config.vocab_size)
        table.append(Parameter(name="head", slots=(head,), columns=config.hidden_size, fewest_bits=8))
    return table


class _Layer:
    """x + attention(norm(x)), then x + mlp(norm(x)); in a sandwich, each summand passes a norm of its own."""

    def __init__(self, config: ModelConfig, layer: int, parameters: Parameters) -> None:
        name, vectors = f"layers.{layer}", parameters.vectors
        self.eps = config.rms_norm_eps
        self.is_local = config.local_rope is not None and config.sliding_windows[layer] > 0
        self.attention_norm_C = vectors[f"{name}.attention_norm"]
        self.attention: Attention | LatentAttentionBlock
        if config.latent is None:
            self.attention = Attention(config, layer, f"{name}.attention", parameters)
        else:
            self.attention = LatentAttentionBlock(config, f"{name}.attention", parameters)
        self.attention_result_norm_C = vectors.get(f"{name}.attention_result_norm")
        self.mlp_norm_C = vectors[f"{name}.mlp_norm"]
        feed_forward = MixtureOfExperts if _has_experts(config, layer) else MLP
        self.mlp = feed_forward(config, f"{name}.mlp", parameters)
        self.mlp_result_norm_C = vectors.get(f"{name}.mlp_result_norm")

    def forward(self, ops: Ops, x_TC: Tensor, rope: RopeTable, batch: Batch, kv: KVLayer) -> Tensor:
        """[T, C] -> [T, C]; may change x_TC."""
        normed_TC = ops.rms_norm(x_TC, self.attention_norm_C, self.eps)
        x_TC += self._normed(ops, self.attention.forward(ops, normed_TC, rope, batch, kv), self.attention_result_norm_C)
        normed_TC = ops.rms_norm(x_TC, self.mlp_norm_C, self.eps)
        x_TC += self._normed(ops, self.mlp.forward(ops, normed_TC), self.mlp_result_norm_C)
        return x_TC

    def _normed(self, ops: Ops, result_TC: Tensor, weight_C: Tensor | None) -> Tensor:
        return result_TC if weight_C is None else ops.rms_norm(result_TC, weight_C, self.eps)


def _rows(images: ImageRows) -> slice:
    return slice(images.start, images.start + images.embeddings_NC.shape[0])


class Decoder:
    """Token ids in, hidden states out; logits for the rows that need them. Holds weights, keeps no state."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, ops: Ops, device: torch.device, max_model_len: int
    ) -> None:
        self.config, self.ops = config, ops
        self.rotations = Rotations(config.rope, max_model_len, device)
        self.local_table = None if config.local_rope is None else rope_table(config.local_rope, max_model_len, device)
        self.embedding = parameters.matrices["embedding"]
        self.layers = [_Layer(config, layer, parameters) for layer in range(config.num_layers)]
        self.norm_C = parameters.vectors["norm"]
        self.head = self.embedding if config.tie_word_embeddings else parameters.matrices["head"]

    def forward(self, batch: Batch, kv: list[KVLayer]) -> Tensor:
        """[T, C] float32: the last layer's output, before the final norm. Writes the step's keys and values to `kv`,
        which has one entry a layer."""
        x_TC = self._embedded(batch)
        batch, rope = self.rotations.of_step(batch)
        local_rope = rope if self.local_table is None else self.local_table
        for index, (layer, kv_layer) in enumerate(zip(self.layers, kv, strict=True)):
            x_TC = layer.forward(self.ops, x_TC, local_rope if layer.is_local else rope, batch, kv_layer)
            for images in batch.images:
                if index < len(images.deepstack_NC):
                    x_TC[_rows(images)] += images.deepstack_NC[index]
        return x_TC

    def _embedded(self, batch: Batch) -> Tensor:
        """[T, C]: tokens' embeddings, and images' in their rows."""
        x_TC = self.ops.embedding(batch.token_ids_T, self.embedding)
        if self.config.embedding_scale != 1.0:
            x_TC *= self.config.embedding_scale
        for images in batch.images:
            assert len(images.deepstack_NC) == self.config.num_deepstack, "an image lacks features for some layers"
            x_TC[_rows(images)] = images.embeddings_NC
        return x_TC

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] float32 for rows of forward's result: final norm, then the output matrix."""
        normed_RC = self.ops.rms_norm(hidden_RC, self.norm_C, self.config.rms_norm_eps)
        return self.ops.linear(normed_RC, self.head, None).float()
