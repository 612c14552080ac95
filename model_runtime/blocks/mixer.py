"""The part of a layer in which rows of a text meet each other: attention over keys and values, over latent vectors, or
a state that goes through the text. Called by the layer, engine and worker processes.

Legend: T tokens of the step, C hidden size.
"""

from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.batch import Batch
from model_runtime.blocks.attention import Attention, attention_table
from model_runtime.blocks.delta import DeltaBlock, delta_table
from model_runtime.blocks.mla import LatentAttentionBlock, latent_attention_table
from model_runtime.caches import LayerCache, keys_and_values, latents, states
from model_runtime.ops.registry import Ops, RopeTable
from model_runtime.parallel import Collectives
from model_runtime.weights.table import Parameter, Parameters

Mixer = Attention | LatentAttentionBlock | DeltaBlock


def mixer_table(config: ModelConfig, layer: int, name: str, key: str) -> list[Parameter]:
    """The parameters under `name` and the checkpoint keys under `key` that fill them. Layers are those of the whole
    model."""
    if _has_state(config, layer):
        return delta_table(config, name, key)
    return (attention_table if config.latent is None else latent_attention_table)(config, name, key)


def make_mixer(config: ModelConfig, layer: int, name: str, parameters: Parameters, collectives: Collectives) -> Mixer:
    """`config` is as wide as this rank's part of the layer."""
    if _has_state(config, layer):
        return DeltaBlock(config, name, parameters)
    if config.latent is None:
        return Attention(config, layer, name, parameters, collectives)
    return LatentAttentionBlock(config, name, parameters)


def mix(mixer: Mixer, ops: Ops, x_TC: Tensor, rope: RopeTable, batch: Batch, cache: LayerCache) -> Tensor:
    """[T, C] -> [T, C]; leaves what the step adds in `cache`."""
    if isinstance(mixer, DeltaBlock):
        return mixer.forward(ops, x_TC, batch, states(cache))
    if isinstance(mixer, LatentAttentionBlock):
        return mixer.forward(ops, x_TC, rope, batch, latents(cache))
    return mixer.forward(ops, x_TC, rope, batch, keys_and_values(cache))


def _has_state(config: ModelConfig, layer: int) -> bool:
    return config.delta is not None and config.delta.layers[layer]
