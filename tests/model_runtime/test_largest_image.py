"""No image comes out larger than memory was planned for: what is larger is refused."""

import random

import pytest

from model_runtime.image_side import _largest_image
from vision.config import Preprocessor
from vision.placeholders import Tiles
from vision.preprocess import idefics3, internvl, kimi, llava_next, pixtral, qwen2_vl
from vision.preprocess.common import ImageShapeError, Recipe
from vision.preprocess.values import Values

RECIPES: dict[str, Recipe] = {
    "idefics3": idefics3.read(Values({})),
    "internvl": internvl.read(Values({})),
    "kimi_k25": kimi.read_k25(Values({})),
    "kimi_vl": kimi.read_vl(Values({"pad_input": True})),
    "llava_onevision": llava_next.read_llava_onevision(Values({})),
    "pixtral": pixtral.read(Values({"size": {"longest_edge": 1540}}), 28),
    "qwen2_vl": qwen2_vl.read(Values({})),
    "qwen2_vl narrow": qwen2_vl.read(Values({"max_pixels": 28 * 28 * 37})),
}


@pytest.mark.parametrize("name", RECIPES)
def test_no_shape_exceeds_the_largest_image(name: str) -> None:
    recipe, draw = RECIPES[name], random.Random(name)
    most = _largest_image(Preprocessor(recipe=recipe, markup=Tiles(per_tile=1), image_token_id=1, placeholder_id=1))
    pixels = []
    for _ in range(1000):
        try:
            layout = recipe.layout(int(2 ** draw.uniform(3, 14)), int(2 ** draw.uniform(3, 14)))
        except ImageShapeError:
            continue
        pixels.append(layout.tiles * layout.height * layout.width)
    assert 0.7 * most <= max(pixels) <= most
