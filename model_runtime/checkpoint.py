"""From a path to a decoder that is ready to run, and the image tower beside it if there is one: a Hugging Face folder
or a GGUF file. Called by the executor, engine and worker processes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from model_runtime.architecture import ModelConfig
from model_runtime.blocks.expert_exchange import ExpertExchange
from model_runtime.device import activation_dtype, usual_kv_dtype
from model_runtime.image_side import LoadedVision, load_image_side
from model_runtime.memory.offload import Offload
from model_runtime.models.decoder import Decoder, decoder_table
from model_runtime.models.next_token import SHARED, next_token_prefix
from model_runtime.opening import Opened, next_token_parameters, open_checkpoint
from model_runtime.ops.registry import Ops
from model_runtime.parallel import ONE_RANK, Mesh
from model_runtime.share import Share, whole_experts_of
from model_runtime.stages import rank_shares
from model_runtime.weights.load import EXACT, Precision, load_parameters
from model_runtime.weights.prepared import PreparedWeights, WeightCache
from model_runtime.weights.table import Parameter, Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder, its image side, and the facts about them."""

    config: ModelConfig
    decoder: Decoder
    vision: LoadedVision | None
    """None: a model of text alone."""
    weight_bytes: int
    """Of both sides, on this rank's device."""
    all_stages_bytes: int
    """What that would be if this rank had all layers."""
    kv_type: torch.dtype
    """How keys and values are stored unless something else is asked for: as they are computed; float16 instead of
    float32 where rows meet matrices of integers, whose numbers are far coarser."""
    description: str
    """For people: family, parameters, storage."""


def _files(opened: Opened) -> list[Path]:
    """What the weights depend on."""
    found: list[Path] = []
    for place in (opened.path, opened.image_folder):
        if place is not None and place.is_dir():
            found += [file for file in place.iterdir() if file.suffix in (".safetensors", ".json")]
        elif place is not None:
            found.append(place)
    return found


class _Progress:
    """Tells the finished share of all numbers to be read."""

    def __init__(self, tell: Callable[[float], None], total: int) -> None:
        self._tell, self._total, self._done = tell, total, 0

    def add(self, count: int) -> None:
        """So many more are read."""
        self.reach(self._done + count)

    def reach(self, done: int) -> None:
        """So many are there."""
        self._done = done
        self._tell(done / self._total)


def load_next_token_layer(
    opened: Opened, ops: Ops, device: torch.device, precision: Precision, share: Share
) -> Parameters:
    """A rank's share of the layer for multi-token prediction behind the last one; `load_model` leaves it out. Raises
    CheckpointError where there is none."""
    prefix = next_token_prefix(opened.config)
    shared = {prefix + key for key in SHARED}
    return load_parameters(
        next_token_parameters(opened),
        opened.source,
        ops,
        device,
        lambda key: key in shared or not key.startswith(prefix),
        lambda count: None,
        share,
        precision,
    )


def _types(parameters: Parameters, device: torch.device, precision: Precision) -> tuple[torch.dtype, torch.dtype]:
    """Of hidden states, and of keys and values. A later stage, which is on CPU, has no embedding to look at."""
    embedding = parameters.matrices.get("embedding")
    stored = None if embedding is None or embedding.quantized else embedding.data.dtype
    dtype = activation_dtype(device, stored, exact=not precision.row_bits)
    return dtype, usual_kv_dtype(dtype, integer_rows=parameters.row_bits > 0)


def _exchange(config: ModelConfig, mesh: Mesh, whole_experts: bool) -> ExpertExchange | None:
    """How this rank asks those that share its sequences for what their experts make of its rows."""
    sharers = mesh.context
    if not whole_experts or mesh.tensor.size > 1 or sharers.size == 1:
        return None
    return ExpertExchange(sharers, [part.count for part in whole_experts_of(config, sharers.size)])


def _numbers(table: list[Parameter]) -> int:
    return sum(parameter.numbers for parameter in table)


def _sizes(weight_bytes: int, offload: Offload | None) -> str:
    """For people."""
    on_host = "" if offload is None else f", and {offload.host_bytes / 2**20:.0f} MiB in host memory"
    return f"{weight_bytes / 2**20:.0f} MiB{on_host}"


def load_model(
    model: Path | Opened,
    ops: Ops,
    device: torch.device,
    progress: Callable[[float], None],
    positions: int | None = None,
    precision: Precision = EXACT,
    cache: WeightCache | None = None,
    mesh: Mesh = ONE_RANK,
    *,
    whole_experts: bool = False,
    offload: Offload | None = None,
) -> LoadedModel:
    """Load a checkpoint, or of many ranks this one's share. `progress` is told the finished share of the weights, 0 to
    1. The decoder gets tables for so many `positions`, or for all that the model was made for. `precision` is that of
    the decoder; the image side is always exact. `cache` is a folder for prepared weights of the decoder; only for
    weights in this machine's memory, none in `offload`. `mesh` are the ranks that share the model, of whose stages the
    first has all beside layers. With `whole_experts` a rank has some instead of columns of all, or, if it shares no
    layers, instead of all that those who share its sequences have. Raises CheckpointError for a checkpoint that is
    missing, damaged or not supported, PlanError for one that cannot be divided, or kept on the host."""
    opened, layout = open_checkpoint(model) if isinstance(model, Path) else model, mesh.layout
    config, table, side = opened.config, decoder_table(opened.config), None if layout.stage else opened.side
    positions = positions or config.max_position
    share = rank_shares(config, layout.sizes, whole_experts=whole_experts)[layout.rank]
    exchange = _exchange(config, mesh, whole_experts)
    decoder_count = _numbers(table)
    count = decoder_count + (0 if side is None else side.num_parameters)
    done = _Progress(progress, count)
    read = partial(load_parameters, table, opened.source, ops, device, opened.ignores, done.add)
    load = partial(read, share, precision, offload)
    files = _files(opened)
    parameters = load() if cache is None else PreparedWeights(cache, files, table, precision, share).get(load)
    done.reach(decoder_count)
    vision = None if side is None else load_image_side(side, ops, device, done.add)
    weight_bytes = parameters.num_bytes + (0 if vision is None else vision.weight_bytes)
    dtype, kv_type = _types(parameters, device, precision)
    return LoadedModel(
        config=config,
        decoder=Decoder(config, parameters, ops, device, positions, dtype, mesh.tensor, share, exchange),
        vision=vision,
        weight_bytes=weight_bytes,
        all_stages_bytes=weight_bytes * decoder_count // _numbers([part for part in table if part.is_in_stage(share)]),
        kv_type=kv_type,
        description=f"{opened.family}, {count / 1e6:.1f} M parameters in {_sizes(weight_bytes, offload)}",
    )
