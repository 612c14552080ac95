"""Pictures with everything known about them: shapes, icons, digits, words, bar charts; the same for the same numbers.

`Painter.scene(seed, index)` is called by the training for each sample, and by the evaluation with its own `Split`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.ImageFont import FreeTypeFont

from vision.embedded import canvas as cv
from vision.embedded.canvas import RGB, Canvas, Generator, UInt8
from vision.embedded.scene import Box, Scene, Thing
from vision.embedded.sources import EVALUATION_VENDOR, VENDORS, load_fonts, load_sprites, open_font
from vision.embedded.vocabulary import COLOUR_NAMES, GLYPHS, ICON_NAMES, SHAPES, WORDS

TRIES = 40
MOST_SHAPES = 4
FONT_SIZES = (20, 24, 28, 34, 40, 48, 60, 76, 92)
LEAST_BAR, MIN_BAR_STEP = 0.15, 0.13
"""Of the height of a chart: the shortest bar, and the difference of any two, so that the tallest can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What pictures of one purpose are made of. The two below share neither backgrounds, sizes nor fonts."""

    backgrounds: tuple[str, ...]
    sides: tuple[tuple[int, int], ...]
    """Ranges of a shape's or icon's side, ends excluded."""
    vendors: tuple[str, ...]
    is_evaluation: bool


TRAIN = Split(
    backgrounds=cv.TRAIN_BACKGROUNDS,
    sides=((20, 32), (36, 52), (60, 80), (88, 112)),
    vendors=tuple(vendor for vendor in VENDORS if vendor != EVALUATION_VENDOR),
    is_evaluation=False,
)
EVALUATION = Split(
    backgrounds=cv.EVALUATION_BACKGROUNDS,
    sides=((32, 36), (52, 60), (80, 88)),
    vendors=("noto", "fluent-emoji-flat"),
    is_evaluation=True,
)
UNSEEN_VENDOR = Split(
    backgrounds=cv.EVALUATION_BACKGROUNDS, sides=EVALUATION.sides, vendors=(EVALUATION_VENDOR,), is_evaluation=True
)


class Painter:
    """Makes the scenes of a split; holds its sprites and fonts."""

    def __init__(self, split: Split, vendors: Sequence[UInt8], faces: Sequence[Sequence[FreeTypeFont]]) -> None:
        """`vendors` have [icons, side, side, 4] each; `faces` each a font for every one of FONT_SIZES."""
        self._split = split
        self._sprites = [[sprites[i] for sprites in vendors if sprites[i].any()] for i in range(len(ICON_NAMES))]
        self._fonts = faces

    def scene(self, seed: int, index: int, kind: str) -> Scene:
        """Picture `index` of a seed; `kind` is one of the vocabulary's scenes."""
        random = np.random.default_rng((seed, index))
        return {
            "shapes": self._shapes,
            "icon": self._icon,
            "digits": self._digits,
            "word": self._word,
            "chart": self._chart,
        }[kind](random)

    def _background(self, random: Generator) -> Canvas:
        return cv.background(random, self._split.backgrounds, cv.any_colour(random))

    def _boxes(self, random: Generator, count: int, least: int, most: int) -> list[Box]:
        """Of things whose sides are of the split's ranges and between two numbers."""
        ranges = [(max(low, least), min(high, most)) for low, high in self._split.sides]
        ranges = [(low, high) for low, high in ranges if low < high]
        for _ in range(TRIES):
            chosen = [ranges[int(random.integers(len(ranges)))] for _ in range(count)]
            boxes = _apart(random, [int(random.integers(low, high)) for low, high in chosen])
            if len(boxes) == count:
                return boxes
        raise AssertionError(f"{count} things with sides from {least} to {most} do not fit")

    def _shapes(self, random: Generator) -> Scene:
        """Three of five pictures have one shape, which is when shapes are learned at all."""
        count = 1 if random.random() < 0.6 else int(random.integers(2, MOST_SHAPES + 1))
        canvas = self._background(random)
        boxes = self._boxes(random, count, 20, cv.SIDE - 8 if count == 1 else 56)
        return _scene("shapes", canvas, [self._shape(random, canvas, i, box) for i, box in enumerate(boxes)])

    def _shape(self, random: Generator, canvas: Canvas, number: int, box: Box) -> Thing:
        colour, paint = _visible(random, canvas)
        shape = int(random.integers(len(SHAPES)))
        turn = random.uniform(-math.pi, math.pi) if SHAPES[shape] == "star" else random.uniform(-0.2, 0.2)
        mask = cv.shape_mask(SHAPES[shape], box[2] - box[0], turn)
        canvas.stamp(number, mask, paint, box[0], box[1])
        return Thing(kind="shape", box=box, colour=colour, shape=shape)

    def _icon(self, random: Generator) -> Scene:
        """One icon, sometimes two; turned, mirrored and tinted a little, since vendors draw differently."""
        canvas = self._background(random)
        count = 1 if random.random() < 0.75 else 2
        things = []
        boxes = self._boxes(random, count, 32, cv.SIDE - 4 if count == 1 else 60)
        for number, (left, top, right, bottom) in enumerate(boxes):
            icon = int(random.integers(len(ICON_NAMES)))
            sprite = self._sprite(random, icon, right - left)
            canvas.stamp(number, sprite.getchannel("A"), sprite.convert("RGB"), left, top)
            things.append(Thing(kind="icon", box=(left, top, right, bottom), icon=icon))
        return _scene("icon", canvas, things)

    def _sprite(self, random: Generator, icon: int, side: int) -> Image.Image:
        drawn = self._sprites[icon]
        image = Image.fromarray(drawn[int(random.integers(len(drawn)))])
        if not self._split.is_evaluation:
            image = _varied(random, image)
        return image.resize((side, side), Image.Resampling.BILINEAR, reducing_gap=2.0)

    def _digits(self, random: Generator) -> Scene:
        count = int(random.integers(1, 5))
        return self._text(random, "digits", "".join(str(digit) for digit in random.integers(0, 10, count)))

    def _word(self, random: Generator) -> Scene:
        """A word of the list; while training half of them are letters at random, for letters are to be read."""
        if not self._split.is_evaluation and random.random() < 0.5:
            letters = random.integers(10, len(GLYPHS), int(random.integers(3, 7)))
            text = "".join(GLYPHS[letter] for letter in letters)
        else:
            text = WORDS[int(random.integers(len(WORDS)))]
        style = random.integers(3)
        return self._text(random, "word", text.upper() if style == 0 else text.capitalize() if style == 1 else text)

    def _text(self, random: Generator, kind: str, text: str) -> Scene:
        """As large as fits or a little smaller, anywhere."""
        canvas = self._background(random)
        colour, paint = _visible(random, canvas)
        sizes = self._fonts[int(random.integers(len(self._fonts)))]
        fitting = [font for font in sizes if font.getlength(text) < cv.SIDE - 6] or sizes[:1]
        font = fitting[-1 - int(random.integers(min(2, len(fitting))))]
        width, (_, upper, _, lower) = math.ceil(font.getlength(text)), font.getbbox(text)
        left = int(random.integers(2, max(3, cv.SIDE - width - 2)))
        top = int(random.integers(2, max(3, cv.SIDE - int(lower - upper) - 2))) - int(upper)
        things = []
        for number, character in enumerate(text):
            start = left + font.getlength(text[:number])
            box = _stamp_glyph(canvas, number, character, font, paint, (round(start), top))
            glyph = GLYPHS.index(character.lower())
            things.append(Thing(kind="glyph", box=box, colour=colour, glyph=glyph, order=number))
        return _scene(kind, canvas, things, text)

    def _chart(self, random: Generator) -> Scene:
        """Bars of different colours and clearly different heights, on an axis."""
        count = int(random.integers(2, 6))
        low = 200 if random.random() < 0.8 else 10
        red, green, blue = random.integers(low, low + 50, 3).tolist()
        canvas = cv.background(random, ("solid",), (red, green, blue))
        heights = _heights(random, count)
        order = np.argsort(heights)
        left, right, floor = 10, cv.SIDE - 6, cv.SIDE - int(random.integers(8, 20))
        canvas.image.paste((90, 90, 90), (left - 2, floor, right, floor + 2))
        canvas.image.paste((90, 90, 90), (left - 2, 6, left, floor))
        step = (right - left) / count
        things: list[Thing] = []
        for number in range(count):
            colour, paint = _visible(random, canvas, frozenset(thing.colour for thing in things))
            width = int(step * 0.7)
            height = int(heights[number] * (floor - 8))
            start = int(left + step * number + step * 0.15)
            mask = Image.new("L", (width, height), 255)
            canvas.stamp(number, mask, paint, start, floor - height)
            rank = 1 if number == order[-1] else 2 if number == order[0] else 0
            box = start, floor - height, start + width, floor
            things.append(Thing(kind="bar", box=box, colour=colour, rank=rank, order=number))
        return _scene("chart", canvas, things)


def load_painter(split: Split, cache: Path) -> Painter:
    """With icons and fonts from their packages. Raises SourceError."""
    fonts = load_fonts(cache)
    faces = fonts.evaluation if split.is_evaluation else fonts.train
    sized = [[open_font(face, size) for size in FONT_SIZES] for face in faces]
    return Painter(split, [load_sprites(cache, vendor) for vendor in split.vendors], sized)


def _scene(kind: str, canvas: Canvas, things: list[Thing], text: str = "") -> Scene:
    pixels, owner = np.asarray(canvas.image), np.asarray(canvas.owner)
    return Scene(kind=kind, pixels=pixels, owner=owner, things=tuple(things), text=text)


def _apart(random: Generator, sides: list[int]) -> list[Box]:
    """Places that do not touch, or fewer of them if they do not fit."""
    boxes: list[Box] = []
    for side in sides:
        for _ in range(TRIES):
            left, top = (int(random.integers(1, cv.SIDE - side)) for _ in range(2))
            box = left, top, left + side, top + side
            if all(_gap(box, other) >= 3 for other in boxes):
                boxes.append(box)
                break
    return boxes


def _gap(one: Box, other: Box) -> int:
    """Between two boxes, negative where they overlap."""
    return max(one[0] - other[2], other[0] - one[2], one[1] - other[3], other[1] - one[3])


def _visible(random: Generator, canvas: Canvas, without: frozenset[int] = frozenset()) -> tuple[int, RGB]:
    """A colour and a shade of it that stands out from the background."""
    for _ in range(TRIES * 10):
        colour = int(random.integers(len(COLOUR_NAMES)))
        paint = cv.shade(random, colour)
        if colour not in without and all(cv.distance(paint, behind) >= cv.MIN_CONTRAST for behind in canvas.behind):
            return colour, paint
    raise AssertionError(f"no colour stands out from {canvas.behind}")


def _varied(random: Generator, image: Image.Image) -> Image.Image:
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if random.random() < 0.6:
        image = image.rotate(random.uniform(-20, 20), Image.Resampling.BILINEAR)
    if random.random() < 0.6:
        gains = random.uniform(0.65, 1.25, 3) if random.random() < 0.5 else np.full(3, random.uniform(0.65, 1.25))
        pixels = np.array(image)
        pixels[..., :3] = np.clip(pixels[..., :3] * gains, 0, 255)
        image = Image.fromarray(pixels)
    return image


def _stamp_glyph(
    canvas: Canvas, number: int, character: str, font: FreeTypeFont, paint: RGB, at: tuple[int, int]
) -> Box:
    """Draws one character; its box."""
    pixels, offset = font.getmask2(character, mode="L")
    mask = Image.new("L", pixels.size)
    mask.im.paste(pixels, (0, 0, *pixels.size))
    left, top = at[0] + int(offset[0]), at[1] + int(offset[1])
    canvas.stamp(number, mask, paint, left, top)
    return left, top, left + mask.width, top + mask.height


def _heights(random: Generator, count: int) -> list[float]:
    """Shares of the room above the axis, no two nearly the same."""
    steps = MIN_BAR_STEP * np.arange(count)
    heights = np.sort(random.uniform(LEAST_BAR, 1 - steps[-1], count)) + steps
    return [float(height) for height in random.permutation(heights)]
