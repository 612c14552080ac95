"""The paged KV cache: its tensors, one group a layer, and how numbers are stored in them. Owned by the runner, engine
and worker processes.

Which block belongs to whom is the scheduler's business; this file only holds the memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from model_runtime.config import KVCacheDtype
from model_runtime.huge_pages import huge_empty

STORAGE_TYPES: Mapping[KVCacheDtype, torch.dtype] = MappingProxyType(
    {
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "int8": torch.int8,
    }
)
"""What `RuntimeConfig.kv_cache_dtype` stands for, unless it is auto."""
LARGEST = 127
"""Of the integers that int8 keys and values are stored as; -128 is not used."""


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Keys and values of one layer: N blocks, H key/value heads, D channels of a head, B tokens in a block.

    The order of dimensions is that of memory on CPU: keys are transposed within a block, so that one vector load holds
    the same channel of neighbouring tokens. On other devices memory is [N, B, H, D], as attention takes it there, and
    these are views of it.
    """

    key_NHDB: Tensor
    value_NHBD: Tensor
    scales_NH2B: Tensor | None = None
    """float32, only with int8: what the integers of a head's key, and of its value, are multiples of."""

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.key_NHDB.shape[0]

    @property
    def block_size(self) -> int:
        """B."""
        return self.key_NHDB.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """How numbers are stored."""
        return self.key_NHDB.dtype

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """All memory, by block."""
        pair = (self.key_NHDB, self.value_NHBD)
        return pair if self.scales_NH2B is None else (*pair, self.scales_NH2B)

    @property
    def key_NBHD(self) -> Tensor:
        """The keys token by token; contiguous on devices other than the CPU."""
        return self.key_NHDB.permute(0, 3, 1, 2)

    @property
    def value_NBHD(self) -> Tensor:
        """The values token by token; contiguous on devices other than the CPU."""
        return self.value_NHBD.transpose(1, 2)


def storage_type(asked: KVCacheDtype, usual: torch.dtype) -> torch.dtype:
    """How keys and values are stored; auto: as is usual for the model."""
    return STORAGE_TYPES.get(asked, usual)


def allocate(
    *,
    num_blocks: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVLayer:
    """Reserve a layer's pool. On CPU the pages are touched only when first written, so an idle one costs no memory."""
    heads = (num_blocks, num_kv_heads)
    scales_NH2B = torch.empty(*heads, 2, block_size, device=device) if dtype == torch.int8 else None
    if device.type == "cpu":
        key_NHDB = huge_empty((*heads, head_dim, block_size), dtype)
        value_NHBD = huge_empty((*heads, block_size, head_dim), dtype)
        return KVLayer(key_NHDB, value_NHBD, scales_NH2B)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    key_NBHD, value_NBHD = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    return KVLayer(key_NBHD.permute(0, 2, 3, 1), value_NBHD.transpose(1, 2), scales_NH2B)


def quantise(head_D: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., D] and float32 [...]: each head as multiples, rounded to nearest even, of its scale max|x| / 127.

    A head that is not finite gets a scale that is not, so that it shows in whatever attends to it."""
    scale = head_D.float().abs().amax(dim=-1) / LARGEST
    multiples_D = (head_D.float() / scale[..., None]).nan_to_num(0.0)  # 0 / 0 in a head of zeros
    return multiples_D.round().clamp(-LARGEST, LARGEST).to(torch.int8), scale
