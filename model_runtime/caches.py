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
from model_runtime.state_store import StateLayer, allocate_states

PagedLayer = KVLayer | LatentLayer
"""What a layer keeps of the tokens it has seen, in blocks that the scheduler gives out."""
LayerCache = PagedLayer | StateLayer
"""That, or a state of them all together, in slots that the scheduler gives out."""
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


def states(cache: LayerCache) -> StateLayer:
    """The cache of a layer that goes through a text with a state."""
    assert isinstance(cache, StateLayer), f"a {type(cache).__name__} where a state is needed"
    return cache


def paged(caches: Caches) -> PagedLayer:
    """The first one that is in blocks; others are like it in number and length of these."""
    return next(cache for cache in caches if not isinstance(cache, StateLayer))


def allocate_caches(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_states: int = 0,
) -> list[LayerCache]:
    """Reserve the pool of all layers, and slots for so many states."""
    kv_heads = iter(config.kv_heads)

    def cache(has_state: bool) -> LayerCache:
        if has_state:
            return allocate_states(config, num_states)
        num_kv_heads = next(kv_heads)
        if config.latent is not None:
            width, rank = config.latent.row_width, config.latent.latent_rank
            return allocate_latents(num_blocks, block_size, width, rank, dtype, device)
        return allocate(
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
        )

    return [cache(has_state) for has_state in config.delta_layers]


def give_back(caches: Caches, blocks: "array[int]", slots: "array[int]") -> None:
    """Return the memory of these blocks, and slots for states, to the system; it comes back when they are written. On
    CPU only: a device's memory is nobody else's."""
    of_blocks, of_slots = _runs(blocks), _runs(slots)
    for layer in caches:
        pools, runs = (layer.by_slot, of_slots) if isinstance(layer, StateLayer) else (layer.pools, of_blocks)
        for pool in pools:
            for run in runs if pool.device.type == "cpu" else ():
                release_pages(pool[run])


def _runs(numbers: "array[int]") -> list[slice]:
    """Those that follow each other together."""
    ordered = np.sort(np.asarray(numbers))
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1) if len(ordered) else []
    return [slice(int(run[0]), int(run[-1]) + 1) for run in runs]
