"""How far two tensors are apart, and how far they may be. Process of `firstlight align`.

Legend: L tokens, X width of a place, V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

SINGLE: Mapping[str, float] = MappingProxyType(
    {
        "norm": 32,
        "qk_norm": 32,
        "residual": 8,
        "embedding": 64,
        "activation": 32,
        "rope": 64,
        "attention": 512,
        "tower": 512,
        "linear": 256,
        "router": 256,
        "routing": 512,
        "experts": 512,
        "logits": 256,
    }
)
"""By kind of operation: by how many units of rounding of float32, relative to the size of its row, a result may differ
that is computed from the same input. Elementwise operations round a few times. In a sum of K products in another order
the errors are random and grow with the root of K, which is 128 for 16384 features. Attention, routing and experts pass
differences on through exponentials."""
NARROW, NARROW_SCORES = 8, 32
"""The same in units of a narrower type, where that holds hidden states, keys and values or what is multiplied: sums are
float32 there too, so what rounds are a few inputs and the result. Scores of attention may be rounded too (transformers
does that), and what they are exponents of is rounded as often as they are large."""
GROWTH = 8
"""Times the root of the number of layers: how much more logits may differ, for every layer inherits what those before
it rounded otherwise."""
UNITS: Mapping[torch.dtype, float] = MappingProxyType(
    {
        torch.float64: 2.0**-53,
        torch.float32: 2.0**-24,
        torch.float16: 2.0**-11,
        torch.bfloat16: 2.0**-8,
        torch.int16: 2.0**-13,
        torch.int8: 2.0**-7,
    }
)
"""Unit of rounding by type: half the distance from 1 to the next number. Of integers, which have a scale for a block of
a row or for a head, for numbers a fourth as large as the largest of the block: so int16, the rows that meet matrices of
integers, lets a product differ by 1e-3."""
ROWS_OF_8_BITS = 256 * UNITS[torch.int16]
"""Of rows of 8 bits for products. A head of int8 in the cache has a scale of its own and values of one size; in rows
there are numbers far below the largest of their block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precisions:
    """What the coarser of product and reference holds numbers in."""

    hidden: torch.dtype
    rows: torch.dtype
    """That are multiplied with matrices; int16: rows of integers."""
    cache: torch.dtype
    """Of keys and values."""
    is_summed: bool = False
    """Whether the residual stream gets what ranks have parts of, summed: there is no place for it before."""

    @property
    def words(self) -> str:
        """For people."""
        hidden, rows, cache = (str(dtype).removeprefix("torch.") for dtype in (self.hidden, self.rows, self.cache))
        return f"hidden states in {hidden}, rows for products in {rows}, keys and values in {cache}"

    def limit(self, kind: str) -> float:
        """Of `Difference.max_rel` at a place of this kind, given the same input."""
        kind = "experts" if self.is_summed and kind == "residual" else kind
        units = [UNITS[self.hidden]]
        if kind in ("linear", "router", "experts", "logits"):
            units.append(ROWS_OF_8_BITS if self.rows is torch.int8 else UNITS[self.rows])
        if kind == "attention":
            units.append(UNITS[self.cache])
        narrow = NARROW_SCORES if kind == "attention" else NARROW
        single, coarsest = UNITS[torch.float32], max(units)
        return SINGLE[kind] * single + (narrow * coarsest if coarsest > single else 0.0)

    def logits_limit(self, num_layers: int) -> float:
        """The same of logits, given the same tokens."""
        narrowest = max((self.hidden, self.rows, self.cache), key=lambda dtype: UNITS[dtype])
        whole = Precisions(hidden=narrowest, rows=narrowest, cache=narrowest)
        return whole.limit("logits") * GROWTH * math.sqrt(num_layers)


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Of two types."""
    return one if UNITS[one] > UNITS[other] else other


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Of a place."""

    max_abs: float
    max_rel: float
    """The largest difference of a number, relative to it, or to its row's size where that is more."""
    cosine: float
    """The least of a row."""


def difference(found_LX: Tensor, expected_LX: Tensor) -> Difference:
    """Of the numbers that are there; what is not finite is infinitely far."""
    is_there_LX = ~found_LX.isnan() | ~found_LX.isnan().all(dim=0)
    found, expected = found_LX.double().where(is_there_LX, 0.0), expected_LX.double().where(is_there_LX, 0.0)
    if not found.isfinite().all():
        return Difference(max_abs=float("inf"), max_rel=float("inf"), cosine=0.0)
    apart = (found - expected).abs()
    return Difference(
        max_abs=apart.max().item(),
        max_rel=(apart / expected.abs().maximum(_size(expected))).max().item(),
        cosine=_cosine(found, expected),
    )


def _size(expected_LX: Tensor) -> Tensor:
    """[L, 1]: the root of the mean square of each row, and no less than the median row's: numbers that happen to be
    small are differences of larger ones."""
    row_L1 = expected_LX.square().mean(dim=1, keepdim=True).sqrt()
    return row_L1.maximum(row_L1.median()).clamp(min=1e-30)


def _cosine(found_LX: Tensor, expected_LX: Tensor) -> float:
    lengths_L = found_LX.norm(dim=1) * expected_LX.norm(dim=1)
    is_zero_L = lengths_L == 0
    cosine_L = (found_LX * expected_LX).sum(dim=1) / lengths_L.where(~is_zero_L, 1.0)
    both_L = (found_LX.norm(dim=1) == 0) & (expected_LX.norm(dim=1) == 0)
    return float(cosine_L.where(~both_L, 1.0).min())


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsDifference:
    """Of the distributions of the next token."""

    max_abs: float
    max_rel: float
    mean_kl: float
    max_kl: float
    """KL divergence of the product's distribution from the reference's, in nats."""
    agreement: float
    """Share of tokens whose most likely next token is the same."""
    decided: int
    """Tokens whose most likely next token differs though the reference's is ahead by more than logits may differ."""


def compare_logits(found_LV: Tensor, expected_LV: Tensor, limit: float) -> LogitsDifference:
    """`limit` is what `max_rel` may be."""
    plain = difference(found_LV, expected_LV)
    found, expected = found_LV.double().log_softmax(dim=1), expected_LV.double().log_softmax(dim=1)
    kl_L = (expected.exp() * (expected - found)).sum(dim=1)
    is_other_L = found.argmax(dim=1) != expected.argmax(dim=1)
    best_L2 = expected_LV.double().topk(2, dim=1).values
    margin_L = (best_L2[:, 0] - best_L2[:, 1]) / _size(expected_LV.double())[:, 0]
    return LogitsDifference(
        max_abs=plain.max_abs,
        max_rel=plain.max_rel,
        mean_kl=kl_L.mean().item(),
        max_kl=kl_L.max().item(),
        agreement=1.0 - is_other_L.double().mean().item(),
        decided=int((is_other_L & (margin_L > 2 * limit)).sum()),
    )


def row_order(found_LX: Tensor, expected_LX: Tensor) -> Tensor:
    """[L]: which row of the second each row of the first is; as they stand, where they are not the same rows."""
    as_they_stand = torch.arange(len(found_LX))
    near, size = 1e-3, _size(expected_LX)
    if ((found_LX - expected_LX).abs() <= near * size).all():
        return as_they_stand
    nearest = torch.cdist(found_LX, expected_LX).min(dim=1)
    apart = (found_LX - expected_LX[nearest.indices]).abs() <= near * size[nearest.indices]
    is_order = len(set(nearest.indices.tolist())) == len(found_LX) and bool(apart.all())
    return nearest.indices if is_order else as_they_stand
