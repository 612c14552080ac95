"""How a reference rotates queries and keys, measured: which channels are pairs, by which angles, how many.

Legend: L tokens, H heads, D channels of a head, R2 pairs of channels that are rotated.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from model_runtime.align.suspects.scene import Scene
from model_runtime.architecture import RopeConfig
from model_runtime.blocks.rope import inverse_frequencies

KINDS: tuple[Literal["default", "linear", "llama3", "yarn"], ...] = ("default", "linear", "llama3", "yarn")
SAME = 1e-3
"""Relative: two measured numbers are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """As measured."""

    interleaved: bool
    channels: int
    frequency_R2: Tensor
    """Radians a position."""
    size: float
    """What it multiplies lengths with."""


def of_rope(scene: Scene) -> Iterator[str]:
    """What differs from the product's rotations."""
    rope = _own(scene)
    found = measured(scene)
    if found is None:
        yield "the reference does not rotate pairs of channels by the position: positions of images (M-RoPE)?"
        return
    if found.channels == 0:
        yield f"the reference does not rotate in this layer; the product rotates {rope.rotary_dim} channels"
        return
    if rope.rotary_dim == 0:
        yield f"the reference rotates {found.channels} channels in this layer; the product does not rotate"
        return
    if found.channels != rope.rotary_dim:
        yield f"rotated channels: {found.channels} of a head in the reference, {rope.rotary_dim} in the product"
    elif found.interleaved != rope.interleaved:
        there, here = ("neighbours (2i, 2i + 1)", "halves (i, i + half)")[:: 1 if found.interleaved else -1]
        yield f"rope layout: the reference rotates {there}, the product {here}"
    if abs(found.size / rope.attention_factor - 1) > SAME:
        yield (
            f"rope attention factor: cosines and sines are {found.size:.4g} times as large in the reference, "
            f"{rope.attention_factor:.4g} times in the product"
        )
    yield from _frequencies(found, rope, scene.product.positions)


def _own(scene: Scene) -> RopeConfig:
    return scene.config.rope_of(scene.layer)


def _frequencies(found: Rotation, rope: RopeConfig, max_position: int) -> Iterator[str]:
    base = _base(found.frequency_R2)
    if found.channels != rope.rotary_dim:
        if base is not None and abs(base / rope.theta - 1) > SAME:
            yield f"rope base: {base:.6g} in the reference, {rope.theta:.6g} in the product"
        return
    own_R2 = inverse_frequencies(rope, max_position).double()
    ratio_R2 = found.frequency_R2 / own_R2
    if (ratio_R2 - 1).abs().max() <= SAME:
        return
    for words, other in _others(rope, found, base):
        if (found.frequency_R2 / inverse_frequencies(other, max_position).double() - 1).abs().max() <= SAME:
            yield words
            return
    least, most = float(ratio_R2.min()), float(ratio_R2.max())
    if most / least - 1 <= SAME:
        yield f"rope scaling: the reference's frequencies are the product's times {most:.4g}"
    else:
        own = f"{rope.kind}, base {rope.theta:.6g}, factor {rope.factor:.4g}"
        yield f"rope scaling or base: the reference's frequencies are {least:.4g} to {most:.4g} times those of {own}"


def _others(rope: RopeConfig, found: Rotation, base: float | None) -> Iterator[tuple[str, RopeConfig]]:
    """Rotations with one thing changed."""
    if rope.long_divisors:
        words = f"LongRoPE: factors for short texts in the reference; max_model_len {rope.original_max_position} gives "
        yield words + "them to the product, too", replace(rope, long_divisors=())
    if base is not None and rope.kind != "default":
        plain = replace(rope, kind="default", theta=base, divisors=(), long_divisors=())
        yield f"rope scaling: none and base {base:.6g} in the reference, {rope.kind} in the product", plain
    places_R = torch.arange(1, found.channels // 2)
    for divided in (1.0, rope.factor):
        # one of the pairs is not scaled, or wholly
        for theta in ((found.frequency_R2[1:] * divided).log() * -found.channels / (2 * places_R)).exp().tolist():
            words = f"rope base: {theta:.6g} in the reference, {rope.theta:.6g} in the product"
            if theta > 1:
                yield words, replace(rope, theta=theta)
    for kind in KINDS:
        if kind in ("default", "linear") or rope.original_max_position:
            yield f"rope scaling: {kind} in the reference, {rope.kind} in the product", replace(rope, kind=kind)
    unscaled_R2 = rope.theta ** -(torch.arange(0, found.channels, 2) / found.channels)
    for factor in (unscaled_R2 / found.frequency_R2).tolist():
        words = f"rope scaling factor: {factor:.4g} in the reference, {rope.factor:.4g} in the product"
        yield words, replace(rope, factor=factor)


def _base(frequency_R2: Tensor) -> float | None:
    """Of frequencies that are powers of one number, as without scaling."""
    count = len(frequency_R2)
    if count < 2 or not bool((frequency_R2 > 0).all()) or abs(float(frequency_R2[0]) - 1) > SAME:
        return None
    base_R = (-frequency_R2[1:].log() * count / torch.arange(1, count)).exp()
    return float(base_R.median()) if float(base_R.max() / base_R.min()) - 1 <= 10 * SAME else None


def measured(scene: Scene) -> Rotation | None:
    """The rotation that makes the reference's output of its input; None: there is none."""
    before_LX, after_LX, latent = _before(scene), scene.expected_LX, scene.config.latent
    if before_LX is None:
        return None
    width = scene.config.head_dim if latent is None else latent.shared_dim
    heads = after_LX.shape[1] // width
    before_LHD, after_LHD = (x.view(len(x), heads, -1) for x in (before_LX, after_LX))
    change_D = (after_LHD - before_LHD).abs().amax(dim=(0, 1))
    # unless cosines are multiplied, channels that are not rotated stay
    moved = int((change_D > SAME * before_LHD.abs().max()).nonzero().max()) + 1 if change_D.max() > 1e-4 else 0
    if moved == 0:
        empty = torch.empty(0, dtype=torch.float64)
        return Rotation(interleaved=False, channels=0, frequency_R2=empty, size=1.0)
    for channels in sorted({moved, moved + moved % 2, width}):
        for interleaved in (False, True):
            turned = _turned(before_LHD, after_LHD, channels, interleaved)
            if turned is not None:
                frequency_R2 = _frequency(turned, scene.positions_L)
                size = float(turned.abs().median())
                return Rotation(interleaved=interleaved, channels=channels, frequency_R2=frequency_R2, size=size)
    return None


def _before(scene: Scene) -> Tensor | None:
    """What is rotated: projected, and normalised if there is a norm; of latent attention the channels that all heads
    share."""
    owner, which = scene.path.rpartition(".")[0], scene.path.rpartition(".")[2][0]
    names = [f"{which}_norm", f"{which}_proj", {"q": "q_b_proj", "k": "kv_a_proj_with_mqa"}[which]]
    name = next((f"{owner}.{name}.out" for name in names if scene.has(f"{owner}.{name}.out")), None)
    if name is None:
        return None
    latent, before_LX = scene.config.latent, scene.at(name)
    if latent is None:
        return before_LX
    width = latent.row_width if which == "k" else scene.config.head_dim
    return before_LX.view(len(before_LX), -1, width)[..., -latent.shared_dim :].flatten(1)


def _turned(before_LHD: Tensor, after_LHD: Tensor, channels: int, interleaved: bool) -> Tensor | None:
    """complex [L, R2]: what pairs of channels are multiplied with, if it is one number for all heads of a token."""
    if channels % 2:
        return None
    before, after = (_pairs(x[..., :channels], interleaved) for x in (before_LHD, after_LHD))
    turn_L1R2 = (before.conj() * after).sum(dim=1, keepdim=True) / before.abs().square().sum(dim=1, keepdim=True)
    rest = (before * turn_L1R2 - after).abs().norm() / after.abs().norm()
    return turn_L1R2[:, 0] if rest < SAME else None


def _pairs(x_LHR: Tensor, interleaved: bool) -> Tensor:
    """complex [L, H, R2]."""
    if interleaved:
        return torch.complex(x_LHR[..., 0::2].contiguous(), x_LHR[..., 1::2].contiguous())
    first, second = x_LHR.chunk(2, dim=-1)
    return torch.complex(first.contiguous(), second.contiguous())


def _frequency(turn_LR2: Tensor, positions_L: Tensor) -> Tensor:
    """[R2]: the angle at position 1, made exact by those of later positions, in which it is contained more often."""
    last = int(positions_L.max())
    frequency_R2 = turn_LR2[positions_L == 1][0].angle()
    position = 2
    while position <= last:
        angle_R2 = turn_LR2[positions_L == position][0].angle()
        rounds_R2 = ((frequency_R2 * position - angle_R2) / (2 * math.pi)).round()
        frequency_R2 = (angle_R2 + 2 * math.pi * rounds_R2) / position
        position *= 2
    return frequency_R2
