"""The caches of a model's layers, of whatever kind each layer needs. Called by the executor and draft models when they
reserve memory, engine and worker processes.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from model_runtime.architecture import ModelConfig
from model_runtime.huge_pages import release_pages
from model_runtime.kv_store import KVLayer, allocate
from model_runtime.latent_store import LatentLayer, allocate_latents

LayerCache = KVLayer | LatentLayer
"""What a layer keeps of the tokens it has seen, in blocks that the scheduler gives out."""
Caches = Sequence[LayerCache]
"""One for each layer."""


def keys_and_values(cache: LayerCache) -> KVLayer:
    """The cache of a layer that has keys and values of its heads."""
    assert isinstance(cache, KVLayer), f"a {type(cache).__name__} where keys and values are needed"
    return cache


def latents(cache: LayerCache) -> LatentLayer:
    """The cache of a layer of latent attention."""
    assert isinstance(cache, LatentLayer), f"a {type(cache).__name__} where latent vectors are needed"
    return cache


def allocate_caches(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Reserve the pool of all layers."""
    if config.latent is not None:
        width, rank = config.latent.row_width, config.latent.latent_rank
        return [*allocate_latents(config.num_layers, num_blocks, block_size, width, rank, dtype, device)]
    layers = allocate(
        num_layers=config.num_layers,
        num_blocks=num_blocks,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    return [*layers]


def give_back(caches: Caches, blocks: "array[int]") -> None:
    """Return the memory of these blocks to the system; it comes back when they are written. On CPU only: a device's
    memory is nobody else's."""
    numbers = np.sort(np.asarray(blocks))
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1) if len(numbers) else []
    for layer in caches:
        for pool in layer.pools:
            if pool.device.type == "cpu":
                for run in runs:
                    release_pages(pool[int(run[0]) : int(run[-1]) + 1])
