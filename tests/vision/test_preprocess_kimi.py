"""Kimi's sizes equal those of transformers' Kimi_K25ImageProcessor, which cannot be imported without torchvision; its
pixels equal Pillow's resize, filled up with black and normalised number by number."""

import ast
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.vision.preprocess_pictures import PACKED, PROJECTOR, SIZES, numbers, picture, pictures, tower_input
from vision.config import read_preprocessor
from vision.placeholders import Patches
from vision.preprocess import kimi
from vision.preprocess.common import ImageShapeError
from vision.preprocess.values import PreprocessorError, Values
from vision.tower_config import VisionTowerConfig

CONFIGS: tuple[dict[str, object], ...] = (
    {},
    {"max_patches": 30},
    {"size": {"max_height": 6, "max_width": 6}},
    {"patch_size": 8, "merge_size": 3, "max_patches": 100, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]},
)
LARGE = ((4000, 300), (300, 4000), (3024, 4032), (1, 9000), (7169, 20), (1792, 1792), (1793, 1807), (1791, 1793))

Resize = Callable[[int, int, int, int, int, int], tuple[tuple[int, int], tuple[int, int]]]


@pytest.fixture(scope="module")
def navit_resize() -> Resize:
    """The function of transformers' image processor alone, out of a module that imports torchvision."""
    package = importlib.util.find_spec("transformers.models.kimi_k25")
    assert package is not None and package.origin is not None
    source = (Path(package.origin).parent / "image_processing_kimi_k25.py").read_text()
    wanted = [
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "navit_resize"
    ]
    names: dict[str, object] = {"math": math}
    exec(compile(ast.Module(body=list(wanted), type_ignores=[]), "navit_resize", "exec"), names)
    found = names["navit_resize"]
    assert callable(found)
    return found


def limits(config: Mapping[str, object]) -> tuple[int, int, int, int]:
    """patch, merge, patches, patches of a side."""
    size = config.get("size", {"max_height": 512})
    assert isinstance(size, dict)
    values = [config.get("patch_size", 14), config.get("merge_size", 2), config.get("max_patches", 16384)]
    assert all(isinstance(value, int) for value in values)
    patch, merge, patches = (int(str(value)) for value in values)
    return patch, merge, patches, size["max_height"]


def tower(patch: int) -> VisionTowerConfig:
    packed = replace(PACKED, layout="rows", patch_size=patch, patch_width=3 * patch**2)
    return VisionTowerConfig(family="", tower=packed, projector=PROJECTOR)


def independent(
    image_HWC: NDArray[np.uint8], config: dict[str, object], resize: Resize
) -> tuple[NDArray[np.float64], tuple[int, int]]:
    """Patches [T, K] as the processor describes them, and their grid, one step after the other in double precision."""
    patch, merge, patches, side = limits(config)
    shrunk, padded = resize(image_HWC.shape[0], image_HWC.shape[1], patch, merge, patches, side)
    resized = Image.fromarray(image_HWC).resize((shrunk[1], shrunk[0]), Image.Resampling.BICUBIC)
    below, right = padded[0] - shrunk[0], padded[1] - shrunk[1]
    filled_HWC = np.pad(np.asarray(resized), ((0, below), (0, right), (0, 0)))
    mean, std = config.get("image_mean", [0.5] * 3), config.get("image_std", [0.5] * 3)
    image_HWC = (filled_HWC / 255 - np.array(mean)) / np.array(std)
    rows, cols = padded[0] // patch, padded[1] // patch
    cut = [
        image_HWC[row * patch : (row + 1) * patch, col * patch : (col + 1) * patch].transpose(2, 0, 1).reshape(-1)
        for row in range(rows)
        for col in range(cols)
    ]
    return np.stack(cut), (rows, cols)


@pytest.mark.parametrize("config", CONFIGS)
def test_sizes(config: dict[str, object], navit_resize: Resize) -> None:
    recipe = kimi.read_k25(Values(config))
    for height, width in (*SIZES, *LARGE):
        _, padded = navit_resize(height, width, *limits(config))
        layout = recipe.layout(height, width)
        assert (layout.height, layout.width) == padded, (height, width)
        assert (layout.image_height, layout.image_width, layout.tiles, layout.rows) == (height, width, 1, 0)


@pytest.mark.parametrize("config", CONFIGS)
def test_pixels(config: dict[str, object], navit_resize: Resize) -> None:
    recipe = kimi.read_k25(Values(config))
    for image_HWC in pictures():
        expected_TK, grid = independent(image_HWC, config, navit_resize)
        found = tower_input(recipe, image_HWC, tower(recipe.patch))
        assert found.grid == grid
        assert np.abs(found.pixels.numpy() - expected_TK).max() < 5e-7, image_HWC.shape


def test_photograph_is_shrunk_to_the_limit(navit_resize: Resize) -> None:
    image_HWC = picture(1800, 2400, 0)
    recipe = kimi.read_k25(Values({}))
    expected_TK, (rows, cols) = independent(image_HWC, {}, navit_resize)
    assert (rows, cols) == (112, 150) and rows * cols > recipe.max_patches
    assert np.abs(numbers(recipe, image_HWC, tower(14)) - expected_TK).max() < 5e-7


def test_black_right_and_below() -> None:
    tiles_NHWC = kimi.read_k25(Values({})).tiles(Image.new("RGB", (20, 30), (200, 200, 200)))
    assert tiles_NHWC.shape == (1, 56, 28, 3)
    assert (tiles_NHWC[0, :30, :20] == 200).all() and tiles_NHWC.sum() == 30 * 20 * 3 * 200


def test_the_publishers_file() -> None:
    published = {
        "media_proc_cfg": {
            "in_patch_limit": 65536,
            "patch_size": 16,
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.5, 0.5, 0.6],
            "merge_kernel_size": 3,
            "fixed_output_tokens": None,
            "patch_limit_on_one_side": 100,
        }
    }
    recipe = kimi.read_k25(Values(published))
    assert (recipe.patch, recipe.merge, recipe.max_patches, recipe.max_side) == (16, 3, 65536, 100)
    assert (recipe.finish.mean, recipe.finish.std) == ((0.5, 0.4, 0.3), (0.5, 0.5, 0.6))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"media_proc_cfg": {"fixed_output_tokens": 64}}, "fixed_output_tokens must be null"),
        ({"size": {"max_height": 512, "max_width": 256}}, "max_width must be 512"),
        ({"max_patches": 0}, "max_patches must be an integer"),
        ({"do_resize": False}, "do_resize must be true"),
    ],
)
def test_what_is_not_supported_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(PreprocessorError, match=message):
        kimi.read_k25(Values(config))


def test_a_tower_of_more_pixels_than_an_image_may_have() -> None:
    recipe = kimi.read_k25(Values({"patch_size": 64, "max_patches": 65536}))
    with pytest.raises(ImageShapeError, match="more than 16777216 pixels"):
        recipe.layout(5000, 5000)


MODEL = {"model_type": "kimi_k25", "image_token_id": 7, "vision_config": {"merge_kernel_size": [2, 2]}}


def test_the_family() -> None:
    """The template writes what stands around the placeholder, which becomes one token for each merged patch."""
    made = read_preprocessor({"image_processor_type": "Kimi_K25ImageProcessor"}, None, MODEL)
    assert made.recipe == kimi.read_k25(Values({}))
    assert (made.markup, made.image_token_id, made.placeholder_id, made.around) == (Patches(unit=28), 7, 7, ("", ""))
    assert made.markup.pieces(made.recipe.layout(57, 100)) == (12,)
    published = {"model_type": "kimi_k25", "media_placeholder_token_id": 163605, "vision_config": {"patch_size": 14}}
    assert read_preprocessor({"media_proc_cfg": {}}, None, published).image_token_id == 163605


def test_a_tower_with_other_patches_is_refused() -> None:
    other = MODEL | {"vision_config": {"merge_kernel_size": 4}}
    with pytest.raises(PreprocessorError, match="patches and merge are 14 and 2, but the tower takes 14 and 4"):
        read_preprocessor({"media_proc_cfg": {}}, None, other)


HALF = [0.5] * 3
VL = {"image_processor_type": "KimiVLImageProcessor", "pad_input": True, "image_mean": HALF, "image_std": HALF}


def vl_sizes(height: int, width: int, limit: int) -> tuple[int, int, int, int]:
    """(height, width) after shrinking, then after filling up, as KimiVLImageProcessor goes about it."""
    if (width // 14) * (height // 14) > limit:
        scale = math.sqrt(limit / ((width // 14) * (height // 14)))
        width, height = int(width * scale), int(height * scale)
    return height, width, height + (28 - height % 28) % 28, width + (28 - width % 28) % 28


@pytest.mark.parametrize("limit", [4096, 30])
def test_sizes_of_kimi_vl(limit: int) -> None:
    recipe = kimi.read_vl(Values(VL | {"in_token_limit": limit}))
    tried = 0
    for height, width in (*SIZES, *LARGE):
        *_, padded_height, padded_width = vl_sizes(height, width, limit)
        layout = recipe.layout(height, width)
        if max(padded_height, padded_width) // 14 < 512:
            assert (layout.height, layout.width) == (padded_height, padded_width), (height, width)
            tried += 1
    assert tried >= len(SIZES)


def test_kimi_vl_shrinks_what_is_longer_than_its_rotations() -> None:
    layout = kimi.read_vl(Values(VL)).layout(9000, 1)
    assert (layout.height, layout.width) == (510 * 14, 28)


def test_pixels_of_kimi_vl() -> None:
    recipe = kimi.read_vl(Values(VL | {"in_token_limit": 30}))
    image_HWC = picture(300, 200, 0)
    height, width, padded_height, padded_width = vl_sizes(300, 200, 30)
    assert (height, width) == (95, 63)
    expected_HWC = np.zeros((padded_height, padded_width, 3), np.uint8)
    resized = Image.fromarray(image_HWC).resize((width, height), Image.Resampling.BICUBIC)
    expected_HWC[:height, :width] = np.asarray(resized)
    assert np.array_equal(recipe.tiles(Image.fromarray(image_HWC)), expected_HWC[None])


def test_the_family_of_kimi_vl() -> None:
    model = {"model_type": "kimi_vl", "media_placeholder_token_id": 163605, "vision_config": {"model_type": "moonvit"}}
    made = read_preprocessor(VL, None, model)
    assert made.recipe == kimi.read_vl(Values(VL)) != kimi.read_k25(Values({}))
    assert (made.markup, made.image_token_id, made.placeholder_id) == (Patches(unit=28), 163605, 163605)
    for change, message in (
        ({"pad_input": None}, "pad_input must be true"),
        ({"merge_kernel_size": [2, 1]}, "merge_kernel_size must be a square"),
        ({"image_processor_type": "CLIPImageProcessor"}, "'CLIPImageProcessor' is not supported for this model"),
    ):
        with pytest.raises(PreprocessorError, match=message):
            read_preprocessor(VL | change, None, model)
