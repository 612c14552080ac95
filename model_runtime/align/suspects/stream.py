"""What a reference does between blocks: scales, sums, caps.

Legend: L rows, X width.
"""

from collections.abc import Iterator
from itertools import permutations

import torch
from torch import Tensor

from model_runtime.align.suspects.scene import Scene, factor_of, left_over


def of_embedding(scene: Scene) -> Iterator[str]:
    """What differs from what the product's first layer takes."""
    factor, rest = factor_of(scene.found_LX, scene.expected_LX)
    if rest < scene.close and abs(factor - 1) > scene.close:
        root = scene.config.hidden_size**0.5
        why = ", the root of the hidden size" if abs(factor * scene.config.embedding_scale / root - 1) < 0.01 else ""
        yield (
            f"embedding scale: {factor * scene.config.embedding_scale:.6g} in the reference{why}, "
            f"{scene.config.embedding_scale:.6g} in the product"
        )


def of_stream(scene: Scene) -> Iterator[str]:
    """What the reference's residual stream is the sum of, at a place where the product's is another."""
    if (alias := scene.reference.aliases.get(scene.place)) is not None:
        yield f"the reference takes {alias} there: a norm, or blocks side by side where the product has them in turn"
        return
    y_LX = scene.expected_LX
    near = scene.neighbours(f"layers.{scene.layer}.")
    if scene.place == f"layers.{scene.layer}.in":
        near = scene.neighbours(f"layers.{scene.layer - 1}.")
    for name, tensor in near.items():
        if left_over(tensor, y_LX) < scene.close:
            yield f"the reference takes {name} there"
            return
    yield from _sum(scene, near, y_LX)


def _sum(scene: Scene, near: dict[str, Tensor], y_LX: Tensor) -> Iterator[str]:
    for base, added in permutations(near, 2):
        factor, rest = factor_of(near[added], y_LX - near[base])
        if rest * float((y_LX - near[base]).norm()) < scene.close * float(y_LX.norm()):
            times = "" if abs(factor - 1) < 1e-3 else f"{factor:.6g} times "
            own = f"; residual multiplier in the product: {scene.config.residual_scale:.6g}"
            yield f"the reference adds {times}{added} to {base}{own}"
            return
    for base, tensor in near.items():
        changed_L = (y_LX - tensor).abs().amax(dim=1) > scene.close * y_LX.abs().amax(dim=1)
        if base.endswith(".out") and 0 < int(changed_L.sum()) < len(y_LX):
            rows = int(changed_L.sum())
            yield f"the reference adds something in {rows} rows to {base}: features of images (deepstack)?"
            return


def of_logits(scene: Scene) -> Iterator[str]:
    """What differs from the product's scale and cap of logits."""
    if not scene.has("lm_head.out"):
        return
    x_LV, y_LV = scene.at("lm_head.out"), scene.reference.logits_LV.double()
    config = scene.config
    own = f"{config.logit_scale:.6g} and {config.logit_softcap or 'none'} in the product"
    factor, rest = factor_of(x_LV, y_LV)
    if rest < scene.close:
        yield f"logit scale and cap: {factor:.6g} and none in the reference, {own}"
        return
    for scale in dict.fromkeys((1.0, config.logit_scale)):
        cap = _cap(x_LV * scale, y_LV)
        if left_over((x_LV * scale / cap).tanh() * cap, y_LV) < scene.close:
            yield f"logit scale and cap: {scale:.6g} and {cap:.6g} in the reference, {own}"
            return


def _cap(x_LV: Tensor, y_LV: Tensor) -> float:
    """That explains best, by halving an interval of its logarithm."""
    low, high = torch.tensor(float(y_LV.abs().max())).log(), torch.tensor(1e4).log()
    for _ in range(60):
        third = (high - low) / 3
        costs = [left_over((x_LV / cap.exp()).tanh() * cap.exp(), y_LV) for cap in (low + third, high - third)]
        low, high = (low, high - third) if costs[0] < costs[1] else (low + third, high)
    return float(((low + high) / 2).exp())
