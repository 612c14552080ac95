"""A painter whose icons are discs and whose font is Pillow's own, since packages are not fetched by tests."""

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from PIL.ImageFont import FreeTypeFont

from vision.embedded.encoder import Painters
from vision.embedded.painter import EVALUATION, FONT_SIZES, TRAIN, Painter, Split
from vision.embedded.sources import SPRITE_SIDE
from vision.embedded.vocabulary import ICON_NAMES


def _sprite(number: int) -> np.ndarray:
    image = Image.new("RGBA", (SPRITE_SIDE, SPRITE_SIDE))
    ImageDraw.Draw(image).ellipse((8, 8, 119, 119), fill=(number, 255 - number, 90, 255))
    return np.asarray(image)


def make_painter(split: Split) -> Painter:
    fonts = [ImageFont.load_default(size) for size in FONT_SIZES]
    assert all(isinstance(font, FreeTypeFont) for font in fonts)
    return Painter(split, [np.stack([_sprite(i) for i in range(len(ICON_NAMES))])], [fonts])


@pytest.fixture(scope="session")
def painter() -> Painter:
    return make_painter(TRAIN)


@pytest.fixture(scope="session")
def evaluation_painter() -> Painter:
    return make_painter(EVALUATION)


@pytest.fixture(scope="session")
def painters(painter: Painter, evaluation_painter: Painter) -> Painters:
    return Painters(train=painter, evaluation=evaluation_painter, unseen=evaluation_painter)
