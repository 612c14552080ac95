"""How a reference weighs keys: attention computed with one thing changed, until it is what the reference has.

Legend: L tokens of a prompt, H query heads, G key/value heads, D channels of a head.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_runtime.align.suspects.scene import Scene, left_over
from model_runtime.blocks.attention import Attention

SCANNED = 128
"""Windows up to this length are tried one by one."""
SPAN, THIRDS = 32.0, 48
"""A scale is sought up to so many times the product's, in so many cuts of an interval by a third."""
CAPS = (1.0, 3.0, 15.0, 20.0, 30.0, 50.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """To attend."""

    scale: float
    window: int
    chunk: int
    softcap: float
    has_sinks: bool


@dataclass(frozen=True, slots=True)
class _Heads:
    """The reference's queries, keys and values, float64, of whole prompts one after the other."""

    query_LHD: Tensor
    key_LHD: Tensor
    value_LHD: Tensor
    prompts: tuple[slice, ...]
    sinks_H: Tensor | None

    def mixed(self, way: _Way) -> Tensor:
        """[L, H D]"""
        return torch.cat([self._of_prompt(rows, way) for rows in self.prompts])

    def _of_prompt(self, rows: slice, way: _Way) -> Tensor:
        query, key, value = (x[rows].transpose(0, 1) for x in (self.query_LHD, self.key_LHD, self.value_LHD))
        scores_HLL = query @ key.mT * way.scale
        if way.softcap:
            scores_HLL = (scores_HLL / way.softcap).tanh() * way.softcap
        position_L = torch.arange(query.shape[1])
        ago_LL = position_L[:, None] - position_L
        begin_L = position_L - position_L % way.chunk if way.chunk else position_L + 1 - (way.window or len(position_L))
        hidden_LL = (ago_LL < 0) | (position_L < begin_L[:, None])
        scores_HLL = scores_HLL.masked_fill(hidden_LL, -math.inf)
        if way.has_sinks and self.sinks_H is not None:
            sinks_HL1 = self.sinks_H[:, None, None].expand(-1, scores_HLL.shape[1], 1)
            scores_HLL = torch.cat((scores_HLL, sinks_HL1), dim=-1)
        weights_HLL = scores_HLL.softmax(dim=-1)[..., : len(position_L)]
        return (weights_HLL @ value).transpose(0, 1).flatten(1)


def of_attention(scene: Scene) -> Iterator[str]:
    """What differs from the product's attention."""
    attention = scene.product.decoder.layers[scene.layer].attention
    heads = _heads(scene)
    if heads is None or not isinstance(attention, Attention):
        return
    scoring = attention.scoring
    own = _Way(
        scale=scoring.scale,
        window=scoring.window,
        chunk=scoring.chunk,
        softcap=scoring.softcap,
        has_sinks=scoring.sinks_H is not None,
    )
    for words, way in _changed(own, heads, scene):
        if left_over(heads.mixed(way), scene.expected_LX) < scene.close:
            yield words
            return


def _heads(scene: Scene) -> _Heads | None:
    owner, config = scene.path.rpartition(".")[0], scene.config.of_layer(scene.layer)
    names = (f"{owner}.q_rope.out", f"{owner}.k_rope.out", f"{owner}.v_proj.out")
    if not all(map(scene.has, names)):
        return None
    widths = (config.head_dim, config.head_dim, config.value_dim or config.head_dim)
    query, key, value = (x.view(len(x), -1, width) for x, width in zip(map(scene.at, names), widths, strict=True))
    group = config.num_heads // config.num_kv_heads
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value * config.value_scale))
    sinks_H = scene.product.decoder.parameters.vectors.get(f"layers.{scene.layer}.attention.sinks")
    return _Heads(query, key, value, tuple(scene.prompts()), None if sinks_H is None else sinks_H.double().cpu())


def _changed(own: _Way, heads: _Heads, scene: Scene) -> Iterator[tuple[str, _Way]]:
    """Ways with one thing changed, and what to say."""
    if heads.sinks_H is not None:
        words = "attention sinks are missing in the product" if not own.has_sinks else "the reference has no sinks"
        yield words, replace(own, has_sinks=not own.has_sinks)
    for softcap in (0.0, *CAPS):
        words = f"attention softcap: {softcap or 'none'} in the reference, {own.softcap or 'none'} in the product"
        yield words, replace(own, softcap=softcap)
    for name, scale in _scales(own, heads, scene).items():
        words = f"attention scale: {scale:.6g} ({name}) in the reference, {own.scale:.6g} in the product"
        yield words, replace(own, scale=scale)
    longest = max(rows.stop - rows.start for rows in heads.prompts)
    for window in sorted({0, own.window - 1, own.window + 1, *scene.config.sliding_windows, *range(1, SCANNED)}):
        if 0 <= window < longest:
            words = f"window: {window or 'none'} in the reference, {own.window or 'none'} in the product, in this layer"
            yield words, replace(own, window=window, chunk=0)
    for chunk in sorted({*scene.config.attention_chunks, *range(2, SCANNED)}):
        words = f"attention in chunks of {chunk} in the reference, of {own.chunk or 'any length'} in the product"
        yield words, replace(own, chunk=chunk)


def _scales(own: _Way, heads: _Heads, scene: Scene) -> Mapping[str, float]:
    head_dim = scene.config.head_dim
    usual = {"1 / root of a head's channels": head_dim**-0.5, "none": 1.0, "1 / a head's channels": 1 / head_dim}
    return usual | {"measured": _best_scale(own, heads, scene)}


def _best_scale(own: _Way, heads: _Heads, scene: Scene) -> float:
    """By cutting an interval of its logarithm into thirds, on the shortest prompt."""
    rows = min(heads.prompts, key=lambda rows: rows.stop - rows.start)
    few = replace(heads, prompts=(rows,))
    low, high = math.log(own.scale / SPAN), math.log(own.scale * SPAN)
    for _ in range(THIRDS):
        third = (high - low) / 3
        ways = (replace(own, scale=math.exp(at)) for at in (low + third, high - third))
        costs = [left_over(few.mixed(way), scene.expected_LX[rows]) for way in ways]
        low, high = (low, high - third) if costs[0] < costs[1] else (low + third, high)
    return math.exp((low + high) / 2)
