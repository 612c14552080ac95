"""The draft model of speculative decoding: a checkpoint of its own, the first layers of the model, or its layer for
multi-token prediction. Made by the executor when it loads, run by the runner, engine process.

Legend: T tokens of the step, R rows whose logits are wanted, C hidden size, V vocabulary.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.caches import Caches, allocate_caches, paged
from model_runtime.checkpoint import LoadedModel, load_model, load_next_token_layer
from model_runtime.config import RuntimeConfig
from model_runtime.kv_store import storage_type
from model_runtime.memory.budget import PlanError, model_length
from model_runtime.models.decoder import Decoder
from model_runtime.models.next_token import NextTokenLayer
from model_runtime.opening import Opened, open_checkpoint
from model_runtime.ops.registry import Ops
from model_runtime.parallel import Collectives, tensor_mesh
from model_runtime.runner import DraftModel
from model_runtime.weights.load import Precision
from model_runtime.weights.table import Parameters
from scheduler.config import SchedulerConfig


class FirstLayers:
    """A decoder cut short: after its first layers come the final norm and the output matrix. What it writes to the
    cache is what the whole decoder would write there."""

    def __init__(self, decoder: Decoder, num_layers: int) -> None:
        self._decoder, self._num_layers = decoder, num_layers

    def forward(self, batch: Batch, kv: Caches) -> Tensor:
        """[T, C]; writes the keys and values of the first layers."""
        return self._decoder.forward_through(batch, kv, self._num_layers)

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] float32."""
        return self._decoder.logits(hidden_RC)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPart:
    """What a draft model takes beside the model."""

    loaded: LoadedModel | None
    """None where it is the model's first layers."""
    weight_bytes: int
    cost: float
    """Of a step, in steps of the model: by the weights that it reads."""
    next_token: Parameters | None = None
    """Where it is the layer for multi-token prediction."""


NO_DRAFT = DraftPart(loaded=None, weight_bytes=0, cost=0.0)


def load_draft(
    opened: Opened,
    scheduler: SchedulerConfig,
    runtime: RuntimeConfig,
    model: LoadedModel,
    ops: Ops,
    device: torch.device,
    precision: Precision,
    collectives: Collectives,
) -> DraftPart:
    """The draft model that is configured, read if it has weights of its own, of which ranks have shares as of the
    model's; NO_DRAFT for methods without one. `opened` is the model. Raises CheckpointError where it cannot be read,
    PlanError where it does not suit the model. Of stages the first has it."""
    config = scheduler.speculative_config
    if config is None or config.method not in ("draft", "self", "mtp") or not model.decoder.share.is_first_stage:
        return NO_DRAFT
    if config.method == "self":
        return _first_layers(config.num_draft_layers, model)
    if config.method == "mtp":
        parameters = load_next_token_layer(opened, ops, device, precision, model.decoder.share)
        return _next_token(parameters, model)
    length = model_length(model.config, runtime)
    draft = open_checkpoint(Path(config.model).expanduser())
    positions = min(length, draft.config.max_position)
    mesh = tensor_mesh(collectives)
    loaded = load_model(draft, ops, device, lambda done: None, positions, precision, mesh=mesh)
    _check(loaded, model, length)
    return DraftPart(loaded=loaded, weight_bytes=loaded.weight_bytes, cost=loaded.weight_bytes / model.all_stages_bytes)


def _check(draft: LoadedModel, model: LoadedModel, length: int) -> None:
    if draft.config.delta is not None:
        raise PlanError(f"{draft.config.family} cannot be a draft model: its layers have states")
    for what, given, needed in (
        ("a vocabulary of {} tokens", draft.config.vocab_size, model.config.vocab_size),
        ("{} positions", min(draft.config.max_position, length), length),
        ("{} bytes of weights", max(draft.weight_bytes, model.all_stages_bytes), model.all_stages_bytes),
    ):
        if given != needed:
            raise PlanError(f"the draft model has {what.format(given)}, and {needed} suit the model")


def _first_layers(num_layers: int, model: LoadedModel) -> DraftPart:
    """The part of the model's first layers, which need nothing more; they share the output matrix, which is read in
    every step."""
    config, in_stage = model.config, model.decoder.own.num_layers
    if num_layers >= config.num_layers:
        raise PlanError(f"num_draft_layers {num_layers} must be less than the {config.num_layers} layers of the model")
    if num_layers > in_stage:
        raise PlanError(
            f"num_draft_layers {num_layers} must be at most the {in_stage} layers of the first pipeline stage"
        )
    hidden, heads = config.hidden_size, 2 * (config.num_heads + config.num_kv_heads)
    layer = hidden * (heads * config.head_dim + 3 * config.intermediate_size)
    head = hidden * config.vocab_size
    cost = (head + num_layers * layer) / (head + config.num_layers * layer)
    return DraftPart(loaded=None, weight_bytes=0, cost=cost)


def _next_token(parameters: Parameters, model: LoadedModel) -> DraftPart:
    """The part of a layer that also reads the model's output matrix."""
    head = model.decoder.head
    assert head is not None, "speculation for a model that writes nothing"
    return DraftPart(
        loaded=None,
        weight_bytes=parameters.num_bytes,
        cost=(parameters.num_bytes + head.num_bytes) / model.all_stages_bytes,
        next_token=parameters,
    )


def next_token_model(decoder: Decoder, parameters: Parameters, kv: Caches) -> DraftModel:
    """The layer for multi-token prediction beside `decoder` with its cache `kv`; its own is of the same kind."""
    num_blocks, block_size = paged(kv).num_blocks, paged(kv).block_size
    normed_SC = torch.empty(num_blocks * block_size, decoder.config.hidden_size, dtype=decoder.dtype)
    one = replace(decoder.own, num_layers=1)
    own_kv = allocate_caches(one, num_blocks, block_size, paged(kv).dtype, torch.device("cpu"))
    return DraftModel(model=NextTokenLayer(decoder, parameters, normed_SC), kv=own_kv, normed_SC=normed_SC)


def draft_model(
    scheduler: SchedulerConfig, runtime: RuntimeConfig, part: DraftPart, decoder: Decoder, kv: Caches
) -> DraftModel | None:
    """Ready to run beside `decoder` with its cache `kv`; None for methods without one."""
    config = scheduler.speculative_config
    if config is not None and config.method == "self":
        return DraftModel(model=FirstLayers(decoder, config.num_draft_layers), kv=kv)
    if part.next_token is not None:
        return next_token_model(decoder, part.next_token, kv)
    if part.loaded is None:
        return None
    own, kv_type = part.loaded.decoder.own, storage_type(runtime.kv_cache_dtype, part.loaded.kv_type)
    own_kv = allocate_caches(own, paged(kv).num_blocks, scheduler.block_size, kv_type, torch.device("cpu"))
    return DraftModel(model=part.loaded.decoder, kv=own_kv)
