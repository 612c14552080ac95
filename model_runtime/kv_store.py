"""The paged KV cache: one pair of tensors a layer. Owned by the runner, engine and worker processes.

Which block belongs to whom is the scheduler's business; this file only holds the memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Keys and values of one layer.

    Keys are stored transposed within a block, so that one vector load holds the same channel of neighbouring tokens:
    N blocks, H key/value heads, D channels of a head, B tokens in a block.
    """

    key_NHDB: Tensor
    value_NHBD: Tensor


def bytes_per_block(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers: 2 (key, value) x layers x heads x channels x tokens x bytes of a number."""
    return 2 * num_layers * num_kv_heads * head_dim * block_size * dtype.itemsize


def allocate(
    *,
    num_layers: int,
    num_blocks: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[KVLayer]:
    """Reserve the pool. On CPU the pages are touched only when first written, so an idle pool costs no memory."""
    shape_key = (num_blocks, num_kv_heads, head_dim, block_size)
    shape_value = (num_blocks, num_kv_heads, block_size, head_dim)
    return [
        KVLayer(
            torch.empty(shape_key, dtype=dtype, device=device), torch.empty(shape_value, dtype=dtype, device=device)
        )
        for _ in range(num_layers)
    ]
