"""What the eyes can tell apart: the classes of every head, in the order of the trained rows.

Used by the generator, the training and the evaluation. Changing a name or an order makes trained weights worthless.
"""

from pathlib import Path

FOLDER = Path(__file__).parent

COLOURS = {
    "red": (220, 40, 40),
    "orange": (245, 140, 30),
    "yellow": (250, 220, 50),
    "green": (50, 160, 70),
    "blue": (50, 90, 215),
    "purple": (130, 60, 180),
    "pink": (245, 130, 190),
    "brown": (125, 75, 40),
    "black": (25, 25, 25),
    "white": (245, 245, 245),
    "gray": (128, 128, 128),
}
COLOUR_NAMES = tuple(COLOURS)
SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond", "cross", "ring")
GLYPHS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""A capital letter is of the class of its small one."""
KINDS = ("background", "shape", "icon", "glyph", "bar")
SCENES = ("shapes", "icon", "digits", "word", "chart")
SIZES = ("small", "large")
RANKS = ("between", "tallest", "shortest")
"""Of the bars of a chart."""
COLUMNS = ("left", "middle", "right")
ROWS = ("top", "middle", "bottom")
MAX_COUNT = 6
"""Things in a picture, at most: the letters of the longest words."""


def _entries(file: str) -> tuple[str, ...]:
    return tuple((FOLDER / file).read_text().split())


def _icons() -> dict[str, str]:
    """What a thing is called, to the vendors' name of its icon."""
    pairs = (entry.partition("=") for entry in _entries("icons.txt"))
    return {name: file or name for name, _, file in pairs}


ICONS = _icons()
ICON_NAMES = tuple(ICONS)
WORDS = _entries("words.txt")

HEADS = {
    "kind": len(KINDS),
    "scene": len(SCENES),
    "count": MAX_COUNT,
    "column": len(COLUMNS),
    "row": len(ROWS),
    "colour": len(COLOURS),
    "shape": len(SHAPES),
    "size": len(SIZES),
    "icon": len(ICONS),
    "glyph": len(GLYPHS),
    "rank": len(RANKS),
    "order": MAX_COUNT,
}
"""Classes of each head. The first five answer for every patch, the others for patches with something on them."""
