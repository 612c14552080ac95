"""GGUF's blocks of 256 numbers, Q4_K and Q6_K, in plain torch: how they are expanded. Used by `quantized.py`; the
compiled kernels have their own.

Parts of a block have scales of 6 or 8 bits, times a float16 of the block
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).

Legend: B blocks.
"""

import torch
from torch import Tensor


def expand_q4_k(raw_BR: Tensor, out_BX: Tensor) -> None:
    """[B, 144] -> [B, 256]: two float16, scales and minima of eight parts of 32 in 12 bytes, 4 bits a number."""
    factors_B2 = raw_BR[:, :4].contiguous().view(torch.float16).float()
    packed_B34 = raw_BR[:, 4:16].view(-1, 3, 4)
    low, high, rest = packed_B34.unbind(1)
    scales_B8 = torch.cat((low & 63, rest & 15 | low >> 6 << 4), dim=1).float()
    minima_B8 = torch.cat((high & 63, rest >> 4 | high >> 6 << 4), dim=1).float()
    bytes_B41x = raw_BR[:, 16:].view(-1, 4, 1, 32)
    codes_B8x = torch.cat((bytes_B41x & 15, bytes_B41x >> 4), dim=2).view(-1, 8, 32).float()
    scales_B81 = (factors_B2[:, :1] * scales_B8)[..., None]
    out_BX.copy_((codes_B8x * scales_B81 - (factors_B2[:, 1:] * minima_B8)[..., None]).flatten(1))


def expand_q6_k(raw_BR: Tensor, out_BX: Tensor) -> None:
    """[B, 210] -> [B, 256]: lower 4 and upper 2 bits of the numbers, scales of sixteen parts of 16, a float16."""
    low_B2x = raw_BR[:, :128].view(-1, 2, 1, 64)
    high_B21x = raw_BR[:, 128:192].view(-1, 2, 1, 32)
    scales_B16 = raw_BR[:, 192:208].view(torch.int8).float()
    factor_B1 = raw_BR[:, 208:].contiguous().view(torch.float16).float()
    low_B24x = torch.cat((low_B2x & 15, low_B2x >> 4), dim=2).view(-1, 2, 4, 32)
    high_B24x = torch.cat([high_B21x >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    codes_B16x = (low_B24x | high_B24x << 4).view(-1, 16, 16).float() - 32
    out_BX.copy_((codes_B16x * (factor_B1 * scales_B16)[..., None]).flatten(1))


def factors(quantized: str, raw_BR: Tensor) -> Tensor:
    """The float16 of blocks."""
    return (raw_BR[:, :4] if quantized == "q4_k" else raw_BR[:, 208:]).contiguous().view(torch.float16)
