"""What images take: the cache of their embeddings, and encoding one. Called by `planning.py` before a model is loaded.
Arithmetic only; a test compares it with what a real tower takes.
"""

from dataclasses import dataclass

from model_runtime.memory.steps import FLOAT_BYTES
from vision.encoder.model import GROUP_PATCHES
from vision.tower_config import PackedConfig, VisionTowerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMemory:
    """Bytes that images take beside the weights."""

    cache: int
    encode: int
    """While one is encoded, which is over before the step's tokens are computed."""


def encode_bytes(config: VisionTowerConfig, num_pixels: int) -> int:
    """Peak of temporary tensors while the tower encodes one image of `num_pixels`, or of one tile if that is more.

    The image is there as bytes and, twice, as float32 colours (patches that repeat a frame are twice as large). A block
    holds the tokens of a group of tiles, or of a whole packed image: either the residual stream, its norm, fused q, k
    and v and what attention makes of them, or the stream before and after attention, its norm, and what the
    feed-forward block makes.
    """
    tower, block = config.tower, config.tower.block
    mlp = 4 * block.hidden_size + block.intermediate_size * (5 if block.gated else 2)
    if isinstance(tower, PackedConfig):
        tokens = num_pixels // tower.patch_size**2
        layer = tokens * (max(12 * block.hidden_size, mlp) + 4 * block.head_dim)
        return 3 * num_pixels + FLOAT_BYTES * (2 * tokens * tower.patch_width + layer)
    num_pixels = max(num_pixels, tower.image_size**2)
    tokens = max(tower.grid**2, min(GROUP_PATCHES, num_pixels // tower.patch_size**2))
    layer = tokens * (max(7 * block.hidden_size, mlp) + tower.feature_size)
    return num_pixels * 3 * (1 + 2 * FLOAT_BYTES) + FLOAT_BYTES * layer


def image_pixels(config: VisionTowerConfig, largest: int, least: int, budget: int) -> int:
    """Pixels of the largest image that is encoded: `largest`, unless that takes more than a quarter of the budget, but
    always `least`."""
    wanted = max(largest, least)
    fitting = budget // 4 * wanted // encode_bytes(config, wanted)
    return max(least, min(wanted, fitting))
