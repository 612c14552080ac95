"""A picture under construction: pixels, and for each pixel the thing that it shows. Backgrounds and shapes are drawn
here. Used by `painter.py` only. All randomness comes from the generator that is given.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from vision.embedded.vocabulary import COLOUR_NAMES, COLOURS

SIDE = 128
"""Pixels of a picture's side."""
OVERSAMPLING = 4
MIN_CONTRAST = 90.0
"""Least distance in RGB between a thing and what is behind it."""
JITTER = 12.0

RGB = tuple[int, int, int]
Generator = np.random.Generator
UInt8 = npt.NDArray[np.uint8]
Plane = npt.NDArray[np.floating[Any]]
"""[side, side]"""
Points = tuple[tuple[float, float], ...]

TRAIN_BACKGROUNDS = ("solid", "solid", "gradient", "stripes", "noise", "clouds")
EVALUATION_BACKGROUNDS = ("solid", "rings", "checks")


@dataclass(frozen=True, slots=True)
class Canvas:
    """`owner` is 0 where the background is seen, else one more than the number of the thing."""

    image: Image.Image
    owner: Image.Image
    behind: tuple[RGB, RGB]
    """The two colours of the background."""

    def stamp(self, number: int, mask: Image.Image, paint: RGB | Image.Image, left: int, top: int) -> None:
        """Thing `number` through a mask ("L") of its own size."""
        box = (left, top, left + mask.width, top + mask.height)
        self.image.paste(paint, box, mask)
        self.owner.paste(number + 1, box, mask.point(lambda value: 255 * (value > 127)))


def distance(one: RGB, other: RGB) -> float:
    """Euclidean, in RGB."""
    return math.dist(one, other)


def shade(random: Generator, colour: int) -> RGB:
    """A colour of that name."""
    base = np.array(COLOURS[COLOUR_NAMES[colour]])
    red, green, blue = np.clip(base + np.clip(random.normal(0, JITTER, 3), -28, 28), 0, 255).astype(int).tolist()
    return red, green, blue


def any_colour(random: Generator) -> RGB:
    """Any colour at all; half of them pale, as papers and walls are."""
    low = 190 if random.random() < 0.5 else 0
    red, green, blue = random.integers(low, 256, 3).tolist()
    return red, green, blue


def _gradient(random: Generator, x: Plane, y: Plane) -> Plane:
    angle = random.uniform(0, 2 * math.pi)
    ramp = x * math.cos(angle) + y * math.sin(angle)
    scaled: Plane = (ramp - ramp.min()) / np.ptp(ramp)
    return scaled


def _stripes(random: Generator, x: Plane, y: Plane) -> Plane:
    angle, period = random.uniform(0, math.pi), random.uniform(6, 30)
    return (np.sin((x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / period) > 0).astype(np.float32)


def _noise(random: Generator, x: Plane, y: Plane) -> Plane:
    return random.random(x.shape, dtype=np.float32)


def _clouds(random: Generator, x: Plane, y: Plane) -> Plane:
    coarse = random.integers(0, 256, (int(random.integers(3, 9)),) * 2, dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.asarray(smooth, dtype=np.float32) / np.float32(255)


def _rings(random: Generator, x: Plane, y: Plane) -> Plane:
    middle = random.uniform(0, SIDE, 2)
    waves: Plane = np.sin(np.hypot(x - middle[0], y - middle[1]) * 2 * math.pi / random.uniform(10, 40))
    return waves / 2 + 0.5


def _checks(random: Generator, x: Plane, y: Plane) -> Plane:
    period = int(random.integers(6, 24))
    return ((x // period + y // period) % 2).astype(np.float32)


_WEIGHTS: Mapping[str, Callable[[Generator, Plane, Plane], Plane]] = {
    "gradient": _gradient,
    "stripes": _stripes,
    "noise": _noise,
    "clouds": _clouds,
    "rings": _rings,
    "checks": _checks,
}
"""How much of the second colour is at each place."""


def background(random: Generator, kinds: tuple[str, ...], first: RGB) -> Canvas:
    """An empty picture. The second colour is near to the first, so that patterns do not outshine what is on them."""
    kind = kinds[int(random.integers(len(kinds)))]
    if kind == "solid":
        return Canvas(Image.new("RGB", (SIDE, SIDE), first), Image.new("L", (SIDE, SIDE)), (first, first))
    other, share = np.array(any_colour(random)), random.uniform(0.15, 0.5)
    ends = np.array(first), np.array(first) * (1 - share) + other * share
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    weight = _WEIGHTS[kind](random, x, y)[..., None]
    pixels = (ends[0] + (ends[1] - ends[0]) * weight).astype(np.uint8)
    red, green, blue = ends[1].astype(int).tolist()
    return Canvas(Image.fromarray(pixels), Image.new("L", (SIDE, SIDE)), (first, (red, green, blue)))


def _regular(corners: int, start: float = -math.pi / 2, inner: float = 1.0) -> Points:
    """Corners on a circle; with `inner` every second one is on a smaller one."""
    angles = [start + 2 * math.pi * i / corners for i in range(corners)]
    radii = [inner if i % 2 else 1.0 for i in range(corners)]
    return tuple((r * math.cos(a), r * math.sin(a)) for a, r in zip(angles, radii, strict=True))


def _heart() -> Points:
    turns = [2 * math.pi * i / 40 for i in range(40)]
    return tuple(
        (
            math.sin(t) ** 3,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16,
        )
        for t in turns
    )


_OUTLINES: Mapping[str, Points] = {
    "square": ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    "triangle": _regular(3),
    "star": _regular(10, inner=0.42),
    "heart": _heart(),
    "diamond": ((0, -1), (0.68, 0), (0, 1), (-0.68, 0)),
    "cross": tuple(
        (x, y)
        for x, y in (
            (-0.3, -1), (0.3, -1), (0.3, -0.3), (1, -0.3), (1, 0.3), (0.3, 0.3),
            (0.3, 1), (-0.3, 1), (-0.3, 0.3), (-1, 0.3), (-1, -0.3), (-0.3, -0.3),
        )
    ),
}  # fmt: skip


def shape_mask(shape: str, side: int, turn: float) -> Image.Image:
    """ "L" [side, side]; `turn` in radians. Circles and rings look the same however they are turned."""
    large = side * OVERSAMPLING
    mask = Image.new("L", (large, large))
    draw = ImageDraw.Draw(mask)
    if shape in ("circle", "ring"):
        draw.ellipse((0, 0, large - 1, large - 1), fill=255)
        if shape == "ring":
            rim = large * 0.22
            draw.ellipse((rim, rim, large - 1 - rim, large - 1 - rim), fill=0)
    else:
        cosine, sine = math.cos(turn) * large / 2.15, math.sin(turn) * large / 2.15
        corners = [(large / 2 + x * cosine - y * sine, large / 2 + x * sine + y * cosine) for x, y in _OUTLINES[shape]]
        draw.polygon(corners, fill=255)
    return mask.reduce(OVERSAMPLING)
