"""How a reference chooses and weighs experts, and what it adds to what they give.

Legend: L rows, N experts, C hidden size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import sigmoid

from model_runtime.align.suspects.scene import Scene, factor_of, left_over
from model_runtime.architecture import Experts
from model_runtime.blocks.moe import MixtureOfExperts, route
from model_runtime.ops.registry import select

CLAMPS = (0.0, 0.05, 0.3, 7.0)
SCORES: tuple[Literal["sigmoid", "softmax"], ...] = ("sigmoid", "softmax")
MOST_GROUPS = 16


def _mixture(scene: Scene) -> MixtureOfExperts | None:
    mixture = scene.product.decoder.layers[scene.layer].mlp
    return mixture if isinstance(mixture, MixtureOfExperts) else None


def of_routing(scene: Scene) -> Iterator[str]:
    """What differs from the product's choice: the fewest changes that give the reference's weights."""
    mixture, owner = _mixture(scene), scene.path.rpartition(".")[0]
    if mixture is None or not scene.has(f"{owner}.gate.out"):
        return
    logits_LN, own = scene.at(f"{owner}.gate.out").float(), mixture.config
    bias_N = scene.product.decoder.parameters.vectors.get(f"layers.{scene.layer}.mlp.choice_bias")
    best: list[str] | None = None
    for words, experts, has_bias in _ways(own, bias_N is not None, mixture.choice_bias_N is not None):
        found_LN = _weights(logits_LN, bias_N if has_bias else None, experts)
        factor, rest = factor_of(found_LN, scene.expected_LX)
        if rest > scene.close:
            continue
        if abs(factor - 1) > 1e-3:
            scale = factor * own.scale
            words = [*words, f"weights are scaled by {scale:.6g} in the reference, {own.scale:.6g} in the product"]
        if best is None or len(words) < len(best):
            best = words
    yield from best or []


def _ways(own: Experts, has_bias: bool, uses_bias: bool) -> Iterator[tuple[list[str], Experts, bool]]:
    """(what to say of the reference, how it would choose, whether with the bias)."""
    flags = (False, True)
    for renormalise, scores, groups, biased in product(flags, SCORES, _groups(own), flags):
        if biased and not has_bias:
            continue
        words = []
        if renormalise != own.renormalise:
            words.append(f"weights are {'' if renormalise else 'not '}divided by their sum in the reference")
        if scores != own.router:
            words.append(f"scores are made by {scores} in the reference, by {own.router} in the product")
        if groups != (own.num_groups, own.num_chosen_groups):
            words.append(f"experts are chosen from {groups[1]} of {groups[0]} groups in the reference")
        if biased != uses_bias:
            words.append(f"experts are chosen {'with' if biased else 'without'} a bias in the reference")
        count, chosen = groups
        way = replace(own, renormalise=renormalise, router=scores, num_groups=count, num_chosen_groups=chosen)
        yield words, way, biased


def _groups(own: Experts) -> list[tuple[int, int]]:
    """(groups, how many of them a token's experts are from): the product's, none, and what else there could be."""
    counts = [count for count in range(2, min(own.num_experts // 2, MOST_GROUPS) + 1) if own.num_experts % count == 0]
    pairs = [(count, chosen) for count in counts for chosen in range(1, count)]
    enough = [pair for pair in pairs if own.num_experts // pair[0] * pair[1] >= own.num_chosen]
    return list(dict.fromkeys([(own.num_groups, own.num_chosen_groups), (1, 1), *enough]))


def _weights(logits_LN: Tensor, bias_N: Tensor | None, experts: Experts) -> Tensor:
    chosen = route(select("any"), logits_LN, bias_N, experts)
    return torch.zeros_like(logits_LN).scatter_(1, chosen.expert_TK, chosen.weight_TK).double()


def of_experts(scene: Scene) -> Iterator[str]:
    """What differs from the product's sum of experts and shared block."""
    mixture = _mixture(scene)
    if mixture is None:
        return
    x_LC = _input(scene)
    if x_LC is None:
        return
    y_LC = scene.expected_LX
    for words, summands in _summands(scene, mixture, x_LC):
        if left_over(sum(summands, torch.zeros_like(y_LC)), y_LC) < scene.close:
            yield words
            return


def _input(scene: Scene) -> Tensor | None:
    names = (f"{scene.path}.gate.in", f"{scene.path}.gate_proj.in")
    return next((scene.at(name).float() for name in names if scene.has(name)), None)


def _summands(scene: Scene, mixture: MixtureOfExperts, x_LC: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
    places: Mapping[str, str] = {
        "shared": f"{scene.path}.shared_experts.down_proj.out",
        "gate": f"{scene.path}.shared_expert_gate.out",
    }
    alone = _alone(scene, mixture, x_LC, mixture.config.clamp)
    yield "the reference has no shared block", [alone]
    if scene.has(places["shared"]):
        shared = scene.at(places["shared"])
        yield "shared block: it is missing, or has a gate that the reference has not", [alone, shared]
        if scene.has(places["gate"]):
            gated = shared * sigmoid(scene.at(places["gate"]))
            yield "gate of the shared block: the reference weighs it with a number for each token", [alone, gated]
    for clamp in CLAMPS:
        words = f"clamp of experts: {clamp or 'none'} in the reference, {mixture.config.clamp or 'none'} in the product"
        yield words, [_alone(scene, mixture, x_LC, clamp)]


def _alone(scene: Scene, mixture: MixtureOfExperts, x_LC: Tensor, clamp: float) -> Tensor:
    """float64 [L, C]: the product's experts, weighed as the reference does."""
    ops, out_LC = scene.product.decoder.ops, torch.zeros_like(x_LC, dtype=torch.float64)
    weights_LN = scene.at(f"{scene.path}.routing.out")
    for expert, block in mixture.experts.items():
        own, block.clamp = block.clamp, clamp
        weight_L1 = weights_LN[:, expert, None]
        if mixture.config.weigh_input:
            out_LC += block.forward(ops, x_LC * weight_L1.float()).double() * (weight_L1 != 0)
        else:
            out_LC += weight_L1 * block.forward(ops, x_LC).double()
        block.clamp = own
    return out_LC
