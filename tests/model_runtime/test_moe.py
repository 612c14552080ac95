"""The router of a mixture of experts: chooses and weighs as transformers', row by row."""

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from model_runtime.architecture import Experts
from model_runtime.blocks.moe import route
from model_runtime.ops import load_ops
from tests.model_runtime.deepseek import EXPERTS, SMALL
from tests.model_runtime.paged import DEVICE


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_router_chooses_and_weighs_as_transformers(kernels: str) -> None:
    router = DeepseekV3TopkRouter(DeepseekV3Config(**(SMALL | {"hidden_size": 12}))).eval()
    router.weight.data = torch.eye(12)
    router.e_score_correction_bias.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    logits_TN = torch.randn(500, 12, generator=torch.Generator().manual_seed(3)) * 3
    logits_TN[0], logits_TN[1, :6] = 0.0, -200.0
    _, expected_TK, chosen_TK = router(logits_TN)
    found = route(load_ops(DEVICE, kernels), logits_TN, router.e_score_correction_bias, EXPERTS)
    order_TK = chosen_TK.argsort(dim=-1)
    assert torch.equal(found.expert_TK, chosen_TK.gather(1, order_TK))
    torch.testing.assert_close(found.weight_TK, expected_TK.gather(1, order_TK), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("experts", [EXPERTS, replace(EXPERTS, router="softmax", num_groups=1, num_chosen_groups=1)])
def test_router_treats_every_row_alike(experts: Experts) -> None:
    """Bit for bit the same for a row alone and among 500; torch's own sigmoid is not."""
    ops, logits_TN = load_ops(DEVICE, "auto"), torch.randn(500, 12, generator=torch.Generator().manual_seed(4)) * 3
    bias_N = torch.linspace(-0.3, 0.3, 12)
    together = route(ops, logits_TN, bias_N, experts)
    for row in range(500):
        alone = route(ops, logits_TN[row : row + 1].clone(), bias_N, experts)
        assert torch.equal(alone.expert_TK[0], together.expert_TK[row])
        assert torch.equal(alone.weight_TK[0], together.weight_TK[row])


def test_every_pair_is_there_once_in_the_order_of_experts() -> None:
    logits_TN = torch.randn(50, 12, generator=torch.Generator().manual_seed(5))
    routed = route(load_ops(DEVICE, "reference"), logits_TN, torch.zeros(12), EXPERTS)
    expert_P, row_P, weight_P1 = routed.pairs()
    assert torch.equal(expert_P, expert_P.sort().values)
    for expert in range(12):
        assert torch.equal(row_P[expert_P == expert], torch.unique(row_P[expert_P == expert]))
    dense_TN = torch.zeros(50, 12).index_put((row_P, expert_P), weight_P1[:, 0], accumulate=True)
    assert torch.equal(dense_TN, torch.zeros(50, 12).scatter_(1, routed.expert_TK, routed.weight_TK))
