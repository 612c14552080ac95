"""The most likely tokens in order, as a stable sort has them."""

import torch

from model_runtime.ranking import ranked


def test_ranked_equals_the_stable_sort() -> None:
    generator = torch.Generator().manual_seed(3)
    for levels in (2, 30, 10**6):
        values = torch.randint(levels, (9, 700), generator=generator).float()
        full, ids = torch.sort(values, dim=1, descending=True, stable=True)
        for count in (1, 5, 256, 699, 700, 900):
            top, top_ids = ranked(values, count)
            assert torch.equal(top, full[:, :count])
            assert torch.equal(top_ids, ids[:, :count])
