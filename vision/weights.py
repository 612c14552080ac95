"""Which checkpoint tensors fill which parameters of a tower and its projector: declared tables, each key used once.

The loader in the engine process sorts out the image tensors with `vision_key`, then calls `load_vision`. Keys are those
of Hugging Face's safetensors files, in the one spelling that `vision_key` reduces them to.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vision.tower_config import (
    BlockConfig,
    FixedGridConfig,
    MergeConfig,
    PackedConfig,
    PoolConfig,
    VisionTowerConfig,
    VisionWeightsError,
)

PREFIXES = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "mm_projector.",
    "connector.",
    "image_newline",
)
SPELLINGS = (
    ("vision_tower.vision_model.", "vision_tower."),
    ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
)
"""What transformers writes one way and published checkpoints another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionParameter:
    """One parameter; several checkpoint tensors of one shape are stacked by rows, in order."""

    name: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    """Of each checkpoint tensor."""


def vision_key(key: str) -> str | None:
    """The one spelling of a checkpoint key of the image side, or None if the key is the language model's.

    Checkpoints differ in a leading `model.`, and in what `SPELLINGS` lists.
    """
    key = key.removeprefix("model.")
    if not key.startswith(PREFIXES):
        return None
    for spelling, canonical in SPELLINGS:
        if key.startswith(spelling):
            return canonical + key.removeprefix(spelling)
    return key


def _linear(name: str, keys: tuple[str, ...], rows: int, columns: int, bias: bool) -> Iterator[VisionParameter]:
    yield VisionParameter(name=f"{name}.weight", keys=tuple(f"{key}.weight" for key in keys), shape=(rows, columns))
    if bias:
        yield VisionParameter(name=f"{name}.bias", keys=tuple(f"{key}.bias" for key in keys), shape=(rows,))


def _norm(name: str, key: str, width: int, bias: bool) -> Iterator[VisionParameter]:
    for ending in ("weight", "bias") if bias else ("weight",):
        yield VisionParameter(name=f"{name}.{ending}", keys=(f"{key}.{ending}",), shape=(width,))


def _vector(name: str, key: str, width: int, rank: int = 1) -> VisionParameter:
    return VisionParameter(name=name, keys=(key,), shape=(1,) * (rank - 1) + (width,))


def _block(config: BlockConfig, layer: int) -> Iterator[VisionParameter]:
    keys, name, width = config.keys, f"layers.{layer}", config.hidden_size
    prefix = keys.layer.format(layer)
    layer_norm = config.norm == "layer"
    qkv = tuple(f"{prefix}.{key}" for key in keys.qkv)
    mlp_in = tuple(f"{prefix}.{key}" for key in keys.mlp_in)
    yield from _norm(f"{name}.norm1", f"{prefix}.{keys.norm1}", width, layer_norm)
    yield from _linear(f"{name}.qkv", qkv, 3 * width // len(qkv), width, config.qkv_bias)
    yield from _linear(f"{name}.out", (f"{prefix}.{keys.out}",), width, width, config.out_bias)
    yield from _norm(f"{name}.norm2", f"{prefix}.{keys.norm2}", width, layer_norm)
    yield from _linear(f"{name}.mlp_in", mlp_in, config.intermediate_size, width, config.mlp_bias)
    yield from _linear(
        f"{name}.mlp_out", (f"{prefix}.{keys.mlp_out}",), width, config.intermediate_size, config.mlp_bias
    )
    if config.qk_norm:
        yield _vector(f"{name}.q_norm", f"{prefix}.attention.q_norm.weight", width)
        yield _vector(f"{name}.k_norm", f"{prefix}.attention.k_norm.weight", width)
    if config.layer_scale:
        yield _vector(f"{name}.scale1", f"{prefix}.lambda_1", width)
        yield _vector(f"{name}.scale2", f"{prefix}.lambda_2", width)


def _fixed_grid(config: FixedGridConfig) -> Iterator[VisionParameter]:
    keys, width, patch = config.keys, config.block.hidden_size, config.patch_size
    patch_shape = (width, config.num_channels, patch, patch)
    yield VisionParameter(name="patch.weight", keys=(f"{keys.patch}.weight",), shape=patch_shape)
    if config.patch_bias:
        yield _vector("patch.bias", f"{keys.patch}.bias", width)
    positions = config.grid**2 + (keys.class_token is not None)
    shape = (1,) * (keys.position_rank - 2) + (positions, width)
    yield VisionParameter(name="position", keys=(keys.position,), shape=shape)
    if keys.class_token is not None:
        yield _vector("class_token", keys.class_token, width, keys.class_token_rank)
    if keys.pre_norm is not None:
        yield from _norm("pre_norm", keys.pre_norm, width, bias=True)
    for layer in range(max(config.feature_layers)):
        yield from _block(config.block, layer)
    if keys.final_norm is not None:
        yield from _norm("final_norm", keys.final_norm, width, bias=True)


def _packed(config: PackedConfig) -> Iterator[VisionParameter]:
    width, patch = config.block.hidden_size, config.patch_size
    # a 3-D convolution's weight is [C, channels, frames, patch, patch], a 2-D one's lacks the frames
    frames = (2,) if config.patch_rank == 5 else ()
    channels = config.patch_width // (patch * patch * (2 if frames else 1))
    shape = (width, channels, *frames, patch, patch)
    yield VisionParameter(name="patch.weight", keys=(f"{config.patch_key}.weight",), shape=shape)
    if config.patch_bias:
        yield _vector("patch.bias", f"{config.patch_key}.bias", width)
    if config.pre_norm_key is not None:
        yield from _norm("pre_norm", config.pre_norm_key, width, bias=config.block.norm == "layer")
    if config.position_key is not None:
        side = config.position_side
        shape = (side, side, width) if config.position_rank == 3 else (side**2, width)
        yield VisionParameter(name="position", keys=(config.position_key,), shape=shape)
    for layer in range(config.num_layers):
        yield from _block(config.block, layer)
    if config.final_norm_key is not None:
        yield from _norm("final_norm", config.final_norm_key, width, bias=config.block.norm == "layer")


def _merge(name: str, config: MergeConfig) -> Iterator[VisionParameter]:
    keys, merged = config.keys, config.in_size * config.merge_size**2
    if keys.norm is not None:
        width = merged if config.norm_after_merge else config.in_size
        yield from _norm(f"{name}.norm", keys.norm, width, config.norm == "layer")
    if keys.merging is not None:
        yield from _linear(f"{name}.merging", (keys.merging,), config.in_size, merged, bias=False)
    if keys.second is None:
        yield from _linear(f"{name}.first", (keys.first,), config.out_size, config.merged_size, config.bias)
        return
    yield from _linear(f"{name}.first", (keys.first,), config.hidden_size, config.merged_size, config.bias)
    yield from _linear(f"{name}.second", (keys.second,), config.out_size, config.hidden_size, config.bias)


def _pool(name: str, config: PoolConfig) -> Iterator[VisionParameter]:
    yield _vector(f"{name}.norm.weight", config.norm_key, config.in_size)
    shape = (config.in_size, config.out_size)
    yield VisionParameter(name=f"{name}.matrix", keys=(config.matrix_key,), shape=shape)


def vision_table(config: VisionTowerConfig) -> list[VisionParameter]:
    """Every parameter of the tower and the projector."""
    tower, projector = config.tower, config.projector
    table = list(_fixed_grid(tower) if isinstance(tower, FixedGridConfig) else _packed(tower))
    table += _merge("projector", projector) if isinstance(projector, MergeConfig) else _pool("projector", projector)
    for index, merger in enumerate(config.deepstack):
        table += _merge(f"deepstack.{index}", merger)
    if config.tiles is not None:
        table.append(_vector("newline", config.tiles.newline_key, projector.out_size))
    return table


def _unread(config: VisionTowerConfig) -> tuple[str, ...]:
    """Beginnings of keys that a checkpoint may hold unused: heads, and blocks above the last feature layer."""
    tower = config.tower
    if isinstance(tower, PackedConfig):
        return ()
    above = range(max(tower.feature_layers), tower.num_layers)
    return (*tower.keys.unread, *(f"{tower.block.keys.layer.format(layer)}." for layer in above))


def _filled(parameter: VisionParameter, tensors: Mapping[str, Tensor]) -> Tensor:
    parts = []
    for key in parameter.keys:
        tensor = tensors[key]
        if tensor.shape != parameter.shape:
            raise VisionWeightsError(
                f"image tensor {key} has shape {tuple(tensor.shape)}, the config asks for {parameter.shape}"
            )
        parts.append(tensor)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def load_vision(config: VisionTowerConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters by name, in the checkpoint's dtype and on its device, from tensors keyed by `vision_key`.

    A tensor is asked for once, when it is its turn, and only if the keys are right. Raises VisionWeightsError for a
    missing tensor, a wrong shape, or a tensor that nothing uses.
    """
    table = vision_table(config)
    unread = _unread(config)
    used = {key for parameter in table for key in parameter.keys}
    missing = [key for key in used if key not in tensors]
    if missing:
        raise VisionWeightsError(f"the checkpoint lacks the image tensor {min(missing)} ({len(missing)} such)")
    unused = [key for key in tensors if key not in used and not key.startswith(unread)]
    if unused:
        raise VisionWeightsError(f"the image tensor {min(unused)} is not used by {config.family} ({len(unused)} such)")
    return {parameter.name: _filled(parameter, tensors) for parameter in table}
