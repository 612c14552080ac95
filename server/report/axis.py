"""An axis of a plot: where values lie on it, and its ticks. Pure; used by `plot.py` and by those who make plots."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

TICKS = 5
"""About so many on an axis."""
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What an axis shows, and how. `base` of a logarithmic one; what is not above 0 lies at its lower end then."""

    label: str
    base: Literal[0, 2, 10] = 0
    from_zero: bool = False
    """Whether a linear axis begins at 0 whatever is on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An axis with its range."""

    low: float
    high: float
    base: int
    ticks: tuple[float, ...]

    def fraction(self, value: float) -> float:
        """How far along the axis a value lies, 0 to 1."""
        if self.base:
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(max(value, self.low)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


def scale_of(axis: Axis, values: Iterable[float]) -> Scale:
    """A scale that holds all of these; they are finite."""
    known = list(values)
    if axis.base:
        return _logarithmic(axis.base, [value for value in known if value > 0])
    known += [0.0] if axis.from_zero or not known else []
    low, high = min(known), max(known)
    if low == high:
        low, high = min(low, 0.0), max(high, 0.0) or low + 1.0
    step = _nice_step((high - low) / TICKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Scale(low=ticks[0], high=ticks[-1], base=0, ticks=ticks)


def _nice_step(least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _logarithmic(base: int, positive: list[float]) -> Scale:
    smallest, largest = (min(positive), max(positive)) if positive else (1.0, 1.0)
    low, high = math.floor(math.log(smallest, base) + 1e-9), math.ceil(math.log(largest, base) - 1e-9)
    high = max(high, low + 1)
    step = max(1, -(-(high - low) // (2 * TICKS)))
    ticks = [float(base) ** power for power in range(low, high + 1, step)]
    if base == 10 and high - low <= 2:
        ticks += [factor * 10.0**power for power in range(low, high) for factor in (2, 5)]
    return Scale(low=float(base) ** low, high=float(base) ** high, base=base, ticks=tuple(sorted(ticks)))


def short(value: float) -> str:
    """A number in few characters: 0.25, 1e-5, 20k, 128Ki."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size and size < 1e-3:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    if size >= 2048 and value % 1024 == 0:
        return f"{value / 2**20:g}Mi" if value % 2**20 == 0 else f"{value / 1024:g}Ki"
    for factor, prefix in PREFIXES:
        if size >= factor * (10 if prefix == "k" else 1):
            return f"{value / factor:.4g}{prefix}"
    return f"{value:.4g}"


def finite(points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The points that can be drawn."""
    return (point for point in points if all(map(math.isfinite, point)))
