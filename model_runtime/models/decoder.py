"""A decoder-only language model assembled from blocks that its `ModelConfig` selects. Engine and worker processes.

Made by `checkpoint.load_model`, called by the runner once a step. Everything a step depends on is in the arguments.

Legend: T tokens of the step, R rows whose logits are wanted, C hidden size, V vocabulary.
"""

import torch
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.blocks.attention import Attention, attention_table
from model_runtime.blocks.mlp import MLP, mlp_table
from model_runtime.blocks.rope import rope_table
from model_runtime.config import ModelConfig
from model_runtime.kv_store import KVLayer
from model_runtime.ops.registry import Ops, RopeTable
from model_runtime.weights.table import Parameter, Parameters, Slot

TIED_HEAD_KEY = "lm_head.weight"


def _layer_table(config: ModelConfig, layer: int) -> list[Parameter]:
    name, key = f"layers.{layer}", f"model.layers.{layer}"
    return [
        Parameter(name=f"{name}.attention_norm", slots=(Slot(f"{key}.input_layernorm.weight", config.hidden_size),)),
        *attention_table(config, f"{name}.attention", f"{key}.self_attn"),
        Parameter(name=f"{name}.mlp_norm", slots=(Slot(f"{key}.post_attention_layernorm.weight", config.hidden_size),)),
        *mlp_table(config, f"{name}.mlp", f"{key}.mlp"),
    ]


def decoder_table(config: ModelConfig) -> list[Parameter]:
    """Every parameter of the decoder, in the order in which it is loaded."""
    embedding = Slot("model.embed_tokens.weight", config.vocab_size)
    table = [Parameter(name="embedding", slots=(embedding,), columns=config.hidden_size)]
    for layer in range(config.num_layers):
        table += _layer_table(config, layer)
    table.append(Parameter(name="norm", slots=(Slot("model.norm.weight", config.hidden_size),)))
    if not config.tie_word_embeddings:
        head = Slot(TIED_HEAD_KEY, config.vocab_size)
        table.append(Parameter(name="head", slots=(head,), columns=config.hidden_size))
    return table


class _Layer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, parameters: Parameters) -> None:
        name = f"layers.{layer}"
        self.eps = config.rms_norm_eps
        self.attention_norm_C = parameters.vectors[f"{name}.attention_norm"]
        self.attention = Attention(config, layer, f"{name}.attention", parameters)
        self.mlp_norm_C = parameters.vectors[f"{name}.mlp_norm"]
        self.mlp = MLP(f"{name}.mlp", parameters)

    def forward(self, ops: Ops, x_TC: Tensor, rope: RopeTable, batch: Batch, kv: KVLayer) -> Tensor:
        """[T, C] -> [T, C]; may change x_TC."""
        normed_TC = ops.rms_norm(x_TC, self.attention_norm_C, self.eps)
        x_TC += self.attention.forward(ops, normed_TC, rope, batch, kv)
        normed_TC = ops.rms_norm(x_TC, self.mlp_norm_C, self.eps)
        x_TC += self.mlp.forward(ops, normed_TC)
        return x_TC


class Decoder:
    """Token ids in, hidden states out; logits for the rows that need them. Holds weights, keeps no state."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, ops: Ops, device: torch.device, max_model_len: int
    ) -> None:
        self.config, self.ops = config, ops
        self.rope = rope_table(config.rope, max_model_len, device)
        self.embedding = parameters.matrices["embedding"]
        self.layers = [_Layer(config, layer, parameters) for layer in range(config.num_layers)]
        self.norm_C = parameters.vectors["norm"]
        self.head = self.embedding if config.tie_word_embeddings else parameters.matrices["head"]

    def forward(self, batch: Batch, kv: list[KVLayer]) -> Tensor:
        """[T, C] float32: the last layer's output, before the final norm. Writes the step's keys and values to `kv`,
        which has one entry a layer."""
        x_TC = self.ops.embedding(batch.token_ids_T, self.embedding)
        for layer, kv_layer in zip(self.layers, kv, strict=True):
            x_TC = layer.forward(self.ops, x_TC, self.rope, batch, kv_layer)
        return x_TC

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] float32 for rows of forward's result: final norm, then the output matrix."""
        normed_RC = self.ops.rms_norm(hidden_RC, self.norm_C, self.config.rms_norm_eps)
        return self.ops.linear(normed_RC, self.head, None).float()
