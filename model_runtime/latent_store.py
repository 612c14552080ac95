"""The paged cache of latent attention: of a token one row, whatever the number of heads. Owned by the runner, engine
and worker processes.

A row is the token's latent vector, normalised, and behind it the channels of the key that all heads share, rotated.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.huge_pages import huge_empty
from model_runtime.kv_store import quantise


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """Rows of one layer: N blocks, B tokens in a block, X numbers of a token, of which the first L are the latent."""

    rows_NBX: Tensor
    latent_rank: int
    """L."""
    scales_NB2: Tensor | None = None
    """float32, only with int8: what the integers of the latent, and of the rest, are multiples of."""

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.rows_NBX.shape[0]

    @property
    def block_size(self) -> int:
        """B."""
        return self.rows_NBX.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """How numbers are stored."""
        return self.rows_NBX.dtype

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """All memory, by block."""
        return (self.rows_NBX,) if self.scales_NB2 is None else (self.rows_NBX, self.scales_NB2)

    def write(self, slots_T: Tensor, row_TX: Tensor) -> None:
        """Put rows into their slots, converted to the type of the cache."""
        rows_SX = self.rows_NBX.view(-1, self.rows_NBX.shape[2])
        if self.scales_NB2 is None:
            rows_SX[slots_T] = row_TX.to(self.dtype)
            return
        scales_S2 = self.scales_NB2.view(-1, 2)
        for column, part in enumerate((slice(0, self.latent_rank), slice(self.latent_rank, None))):
            rows_SX[slots_T, part], scales_S2[slots_T, column] = quantise(row_TX[:, part])

    def gather(self, blocks: Tensor, count: int) -> Tensor:
        """[count, X]: the first rows of these blocks one after the other, int8 expanded."""
        rows_LX = self.rows_NBX[blocks].flatten(0, 1)[:count]
        if self.scales_NB2 is None:
            return rows_LX
        scales_L2 = self.scales_NB2[blocks].flatten(0, 1)[:count]
        lengths = torch.tensor([self.latent_rank, rows_LX.shape[1] - self.latent_rank], device=rows_LX.device)
        return rows_LX * scales_L2.repeat_interleave(lengths, dim=1)


def allocate_latents(
    num_blocks: int, block_size: int, width: int, latent_rank: int, dtype: torch.dtype, device: torch.device
) -> LatentLayer:
    """Reserve a layer's pool of rows of `width` numbers; as with keys and values, an idle one on CPU costs none."""
    shape = (num_blocks, block_size, width)
    rows_NBX = huge_empty(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)
    scales_NB2 = torch.empty(*shape[:2], 2, device=device) if dtype == torch.int8 else None
    return LatentLayer(rows_NBX, latent_rank, scales_NB2)
