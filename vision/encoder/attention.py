"""Attention inside image towers: full, both ways, within segments of a packed sequence. Called by `block.py`.

The towers hand one of these to their blocks, so that a block knows nothing of images. Engine and worker processes.

Legend: T tokens of all images, H heads, D head width, B images of a batch, P tokens of each, N segments.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values [T, H, D] -> [T, H, D]."""


def attend_batch(batch: int) -> Attend:
    """Attention within each of `batch` equally long images."""

    def attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        q_BHPD, k_BHPD, v_BHPD = (x.reshape(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (q_THD, k_THD, v_THD))
        out_BHPD = scaled_dot_product_attention(q_BHPD, k_BHPD, v_BHPD)
        return out_BHPD.transpose(1, 2).reshape(q_THD.shape)

    return attend


def attend_segments(lengths: Sequence[int]) -> Attend:
    """Attention within consecutive segments of these lengths, whose sum is T. Segments of one length go together."""
    starts_of: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        starts_of.setdefault(length, []).append(start)
        start += length

    def attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        assert q_THD.shape[0] == start, f"segments cover {start} of {q_THD.shape[0]} tokens"
        out_THD = torch.empty_like(q_THD)
        for length, starts in starts_of.items():
            first_N = torch.tensor(starts, device=q_THD.device)
            index_NP = first_N[:, None] + torch.arange(length, device=q_THD.device)
            q, k, v = (x[index_NP].transpose(1, 2) for x in (q_THD, k_THD, v_THD))
            out_THD[index_NP] = scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return out_THD

    return attend
