"""The engine's half of preprocessing: the table of a recipe, the order of patches, and what comes with the tiles."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.vision.preprocess_pictures import PACKED, numbers, picture, tower_input, tower_of
from vision.encoder.fixed_grid import patchify
from vision.preprocess import clip, llava_next, qwen2_vl
from vision.preprocess.values import Values
from vision.tower_config import TilesConfig, VisionTowerConfig

PINPOINTS = {"size": 28, "crop_size": 28, "image_grid_pinpoints": [[28, 28], [28, 56], [56, 56]]}


def rows_tower(patch: int) -> VisionTowerConfig:
    """One that takes patches row by row, as Kimi's does."""
    tower = replace(PACKED, layout="rows", patch_size=patch, merge_size=2, patch_width=3 * patch**2)
    return replace(tower_of(qwen2_vl.read(Values({}))), tower=tower)


def test_a_tower_of_rows_gets_patches_in_reading_order() -> None:
    recipe = clip.read_siglip(Values({"size": {"height": 28, "width": 42}}))
    found = tower_input(recipe, picture(60, 50, 0), rows_tower(7))
    expected = patchify(torch.from_numpy(numbers(recipe, picture(60, 50, 0))), 7)[0]
    assert found.grid == (4, 6) and torch.equal(found.pixels, expected)


def test_sides_that_are_no_whole_patches_are_a_broken_promise() -> None:
    recipe = clip.read_siglip(Values({"size": {"height": 30, "width": 42}}))
    with pytest.raises(AssertionError, match="30 x 42 pixels are no whole patches"):
        tower_input(recipe, picture(60, 50, 0), rows_tower(7))


def test_any_resolution_comes_with_its_grid_and_the_size_before_resizing() -> None:
    recipe = llava_next.read_llava_onevision(Values(PINPOINTS | {"size": {"height": 28, "width": 28}}))
    tower = replace(tower_of(recipe), tiles=TilesConfig(newline_key="", max_tiles=9))
    found = tower_input(recipe, picture(50, 100, 0), tower)
    assert (found.tile_grid, found.size, len(found.pixels)) == ((1, 2), (50, 100), 3)
    single = tower_input(recipe, picture(28, 28, 0), tower)
    assert (single.tile_grid, single.size, len(single.pixels)) == ((1, 1), (28, 28), 2)
    alone = tower_input(recipe.one_of_many(), picture(50, 100, 0), tower)
    assert (alone.tile_grid, alone.size, len(alone.pixels)) == (None, (50, 100), 1)
    assert tower_input(recipe, picture(50, 100, 0)).size is None


def test_the_table_holds_every_channel_of_its_own() -> None:
    config = {"image_mean": [0.0, 0.5, 1.0], "image_std": [1.0, 0.5, 2.0]}
    table_CV = clip.read_clip(Values(config)).finish.table()
    assert table_CV.shape == (3, 256) and table_CV.dtype == np.float32
    assert table_CV[:, 0].tolist() == [0.0, -1.0, -0.5]
    assert table_CV[:, 255].tolist() == [1.0, 1.0, 0.0]
