"""A picture and what is on it. Made by `painter.py`; read by the targets, the questions and the measures."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NONE = -1
"""No class: the thing has no such property."""
SMALL_BELOW, LARGE_FROM = 40, 56
"""Sides of things that are called small or large; in between they are neither."""

UInt8 = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""left, top, right, bottom"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """One object. Classes are numbers of the vocabulary, or NONE."""

    kind: str
    box: Box
    colour: int = NONE
    shape: int = NONE
    icon: int = NONE
    glyph: int = NONE
    rank: int = NONE
    order: int = NONE
    """Of a letter or a bar, from the left."""

    def of_head(self, head: str) -> int:
        """Its class for a head of the vocabulary, or NONE."""
        classes = {
            "colour": self.colour,
            "shape": self.shape,
            "size": self.size,
            "icon": self.icon,
            "glyph": self.glyph,
            "rank": self.rank,
            "order": self.order,
        }
        return classes[head]

    @property
    def side(self) -> int:
        """The longer one."""
        return max(self.box[2] - self.box[0], self.box[3] - self.box[1])

    @property
    def size(self) -> int:
        """0 small, 1 large, NONE between."""
        return 0 if self.side < SMALL_BELOW else 1 if self.side >= LARGE_FROM else NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A picture and what is on it."""

    kind: str
    pixels: UInt8
    """[side, side, 3]"""
    owner: UInt8
    """[side, side]: 0 background, else one more than the index of the thing."""
    things: tuple[Thing, ...]
    text: str = ""
    """What digits or letters say."""
