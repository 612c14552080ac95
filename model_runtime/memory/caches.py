"""What the caches of layers take: a function for each kind of cache. Called by `planning.py` before a model is
loaded. Arithmetic only, on architectures as wide as a rank's share.
"""

from dataclasses import replace

import torch

from model_runtime.architecture import ModelConfig
from model_runtime.memory.steps import FLOAT_BYTES


def bytes_per_block(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers: 2 (key, value) x layers x heads x tokens x (channels x bytes of a number,
    and with int8 a float32 scale)."""
    scale = FLOAT_BYTES if dtype == torch.int8 else 0
    return 2 * num_layers * num_kv_heads * block_size * (head_dim * dtype.itemsize + scale)


def latent_bytes_per_block(num_layers: int, width: int, block_size: int, dtype: torch.dtype) -> int:
    """The same where a token has one row of `width` numbers: layers x tokens x (numbers x bytes of one, and with int8
    two float32 scales)."""
    scales = 2 * FLOAT_BYTES if dtype == torch.int8 else 0
    return num_layers * block_size * (width * dtype.itemsize + scales)


def cache_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """What one block takes in all layers of an architecture. Those with a sliding window keep every token, too."""
    if config.latent is not None:
        num_layers = config.num_layers - sum(config.delta_layers)
        return latent_bytes_per_block(num_layers, config.latent.row_width, block_size, dtype)
    return bytes_per_block(1, sum(config.kv_heads), config.head_dim, block_size, dtype)


def state_bytes(config: ModelConfig) -> int:
    """What the state of one sequence takes, of whatever length: layers that have one x (inputs before a row that the
    convolution takes x channels of queries, keys and values + value heads x key x value channels), float32."""
    rule = config.delta
    if rule is None:
        return 0
    past = (rule.conv_width - 1) * rule.channels
    return FLOAT_BYTES * sum(config.delta_layers) * (past + rule.value_heads * rule.key_dim * rule.value_dim)


def next_token_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """One block of the layer for multi-token prediction: its own cache, and outputs of the model's final norm."""
    normed = block_size * config.hidden_size * FLOAT_BYTES
    return cache_block_bytes(replace(config, num_layers=1), block_size, dtype) + normed


def rope_bytes(config: ModelConfig) -> int:
    """A cosine and a sine for each rotated pair of channels, and what queries grow by; at every position, and for each
    kind of layer."""
    ropes = [config.rope] if config.other_rope is None else [config.rope, config.other_rope]
    return FLOAT_BYTES * sum(rope.rotary_dim + (rope.growth is not None) for rope in ropes)
