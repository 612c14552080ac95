"""A decoder-only language model assembled from the layers that its `ModelConfig` selects. Engine and worker processes.

Made by `checkpoint.load_model`, called by the runner once a step. Everything a step depends on is in the arguments.

Legend: T tokens of the step, R rows whose logits are wanted, C hidden size, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.batch import Batch, ImageRows
from model_runtime.blocks.expert_exchange import ExpertExchange
from model_runtime.blocks.moe import MixtureOfExperts
from model_runtime.blocks.rope import Rotations, rope_table
from model_runtime.caches import Caches
from model_runtime.models.depth import DepthLayers, layer_mixtures_table, mixture_table
from model_runtime.models.layer import layer_stack, layer_table, wide_norm_table
from model_runtime.models.offloaded import make_layer
from model_runtime.ops.registry import LayerStack, Ops
from model_runtime.parallel import Alone, Collectives
from model_runtime.share import Share, split, vocabulary_parts
from model_runtime.weights.table import Parameter, Parameters, Slot

EMBEDDING_KEY, TIED_HEAD_KEY = "model.embed_tokens.weight", "lm_head.weight"


def decoder_table(config: ModelConfig, *, first_expert_only: bool = False) -> list[Parameter]:
    """Every parameter of the decoder, in the order in which it is loaded; as in `layer_table`, of one expert a layer if
    so said. Embedding and output matrix are where the first layer is, and the last norm is everywhere."""
    embedding = Slot(EMBEDDING_KEY, config.vocab_size, "vocabulary")
    table = [Parameter(name="embedding", slots=(embedding,), columns=config.hidden_size, fewest_bits=8, layer=0)]
    for layer in range(config.num_layers):
        parameters = layer_table(config, layer, first_expert_only=first_expert_only)
        parameters += layer_mixtures_table(config, layer) if config.depth_group else []
        table += [replace(parameter, layer=layer) for parameter in parameters]
    table += mixture_table(config, "mixture", "model.output_attn_res") if config.depth_group else []
    table.append(wide_norm_table(config, "norm", "model.norm"))
    if not config.tie_word_embeddings and config.has_output:
        head = Slot(TIED_HEAD_KEY, config.vocab_size, "vocabulary")
        table.append(Parameter(name="head", slots=(head,), columns=config.hidden_size, fewest_bits=8, layer=0))
    return table


def _rows(images: ImageRows) -> slice:
    return slice(images.start, images.start + images.embeddings_NC.shape[0])


class Decoder:
    """Token ids in, hidden states out; logits for the rows that need them. Holds weights, keeps no state."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        ops: Ops,
        device: torch.device,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
        collectives: Collectives | None = None,
        share: Share | None = None,
        exchange: ExpertExchange | None = None,
    ) -> None:
        """`dtype` is that of hidden states; the compiled CPU operations know float32 only. `parameters` are those of
        `share`; without it there is one rank."""
        self.config, self.ops, self.dtype = config, ops, dtype
        self.parameters = parameters
        self.collectives = Alone() if collectives is None else collectives
        self.share = split(config, 1)[0] if share is None else share
        self._vocabulary = vocabulary_parts(config.vocab_size, self.collectives.size)
        place = self.collectives.rank, self.collectives.size
        assert (self.share.rank, self.share.size) == place, "another rank's share"
        self.rotations = Rotations(config.rope, max_model_len, device)
        self.other_table = None if config.other_rope is None else rope_table(config.other_rope, max_model_len, device)
        self.embedding = parameters.matrices.get("embedding")
        """None, as is the output matrix, where the first layer is in another stage."""
        self.own = self.share.narrowed(config)
        """Of this rank's share of the layers."""
        self.exchange = exchange
        """Of experts that are divided among ranks with other rows."""
        own_layers = range(self.share.layers.start, self.share.layers.stop)
        self.layers = [make_layer(self.own, layer, parameters, self.collectives, exchange) for layer in own_layers]
        self.stack: LayerStack = (
            DepthLayers(self.own, ops, self.layers, parameters)
            if config.depth_group
            else layer_stack(ops, self.layers, self.collectives)
        )
        self.norm_C = parameters.vectors["norm"]
        self.head = self.embedding if config.tie_word_embeddings else parameters.matrices.get("head")

    def forward(self, batch: Batch, kv: Caches) -> Tensor:
        """[T, C]: the last layer's output, of its stage, before the final norm. Writes the step's keys and values to
        `kv`, which has one entry a layer."""
        return self.forward_through(batch, kv, len(self.layers))

    def forward_through(self, batch: Batch, kv: Caches, num_layers: int) -> Tensor:
        """[T, C]: the output of layer `num_layers` - 1; later ones are not run."""
        x_TC = self._embedded(batch)
        batch, rope = self.rotations.of_step(batch)
        ropes = rope, rope if self.other_table is None else self.other_table
        done, deepest = 0, max((len(images.deepstack_NC) for images in batch.images), default=0)
        for end in sorted({*range(1, min(deepest, num_layers) + 1), num_layers}):
            x_TC = self.stack.run(x_TC, range(done, end), ropes, batch, kv)
            for images in batch.images:
                if end <= len(images.deepstack_NC):
                    x_TC[_rows(images)] += images.deepstack_NC[end - 1]
            done = end
        return x_TC

    def forward_from(self, x_TC: Tensor, batch: Batch, kv: Caches) -> Tensor:
        """[T, C]: as `forward`, of a later stage, from the output of the layer before; may change x_TC."""
        assert not batch.images, "features of images come in where tokens do"
        batch, rope = self.rotations.of_step(batch)
        ropes = rope, rope if self.other_table is None else self.other_table
        return self.stack.run(x_TC, range(len(self.layers)), ropes, batch, kv)

    def _embedded(self, batch: Batch) -> Tensor:
        """[T, C]: tokens' embeddings, and images' in their rows."""
        x_TC = self.token_embeddings(batch.token_ids_T).to(self.dtype)
        if self.config.embedding_scale != 1.0:
            x_TC *= self.config.embedding_scale
        for images in batch.images:
            assert len(images.deepstack_NC) == self.config.num_deepstack, "an image lacks features for some layers"
            x_TC[_rows(images)] = images.embeddings_NC
        return x_TC

    def token_embeddings(self, ids_T: Tensor) -> Tensor:
        """[T, C]. Of many ranks each looks up what is in its part of the table, to which the others add zeros. An id
        outside of the whole table is looked up by the first or last, which find that out."""
        assert self.embedding is not None, "a later stage has no embedding"
        if self.collectives.size == 1:
            return self.ops.embedding(ids_T, self.embedding)
        own_T, part = ids_T - self.share.vocabulary.start, self.share.vocabulary
        first = None if self.collectives.rank == 0 else 0
        last = None if self.collectives.rank == self.collectives.size - 1 else part.count - 1
        looked_up_T = own_T.clamp(first, last)
        x_TC = self.ops.embedding(looked_up_T, self.embedding)
        x_TC.masked_fill_((looked_up_T != own_T)[:, None], 0.0)
        self.collectives.all_reduce(x_TC)
        return x_TC

    def expert_tokens(self) -> int:
        """That this rank's experts have computed so far, in all layers: how equally ranks are loaded."""
        return sum(layer.mlp.tokens for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts))

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] float32 for rows of forward's result: final norm, then the output matrix. On other ranks than the
        first, their part of it alone."""
        return self.output(self.final_norm(hidden_RC))

    def output(self, normed_RC: Tensor) -> Tensor:
        """[R, V] float32: the output matrix, as in `logits`."""
        assert self.head is not None, "a model without an output matrix is asked for logits"
        part_RV = self._scaled(self.ops.linear(normed_RC, self.head, None).float())
        if self.collectives.size == 1:
            return part_RV
        num_rows = len(part_RV)
        parts = self.collectives.gather(part_RV.view(-1), [num_rows * part.count for part in self._vocabulary])
        return part_RV if parts is None else torch.cat([part.view(num_rows, -1) for part in parts], dim=1)

    def final_norm(self, hidden_RC: Tensor) -> Tensor:
        """[R, C] for rows of forward's result."""
        norm = self.ops.rms_norm if self.config.norm == "rms" else self.ops.layer_norm
        return norm(hidden_RC, self.norm_C, self.config.rms_norm_eps)

    def _scaled(self, logits_RV: Tensor) -> Tensor:
        """As the architecture says, some in place."""
        if self.config.logit_scale != 1.0:
            logits_RV *= self.config.logit_scale
        cap = self.config.logit_softcap
        return self.ops.activate(logits_RV / cap, "tanh").mul_(cap) if cap else logits_RV
