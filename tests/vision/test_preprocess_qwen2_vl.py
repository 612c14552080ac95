"""Packed patches equal transformers' Qwen2VLImageProcessorPil bit for bit, in the versions 2, 2.5 and 3."""

from collections.abc import Callable

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.vision.preprocess_pictures import SIZES, as_pil, numbers, picture, pictures
from vision.preprocess import idefics3, qwen2_vl
from vision.preprocess.common import ImageShapeError
from vision.preprocess.values import PreprocessorError, Values

CONFIGS = (
    {"patch_size": 14, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 20}},
    {"patch_size": 14, "min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 9, "resample": 2},
    {
        "patch_size": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 12},
    },
    {"patch_size": 4, "merge_size": 3, "temporal_patch_size": 1, "size": {"shortest_edge": 144, "longest_edge": 20000}},
)


def check(config: dict[str, object], sizes: tuple[tuple[int, int], ...]) -> None:
    recipe, processor = qwen2_vl.read(Values(config)), Qwen2VLImageProcessorPil(**config)
    for image_HWC in pictures(sizes):
        expected = processor(as_pil(image_HWC), return_tensors="np")
        found, layout = numbers(recipe, image_HWC), recipe.layout(*image_HWC.shape[:2])
        assert found.dtype == np.float32 and np.array_equal(found, expected["pixel_values"]), image_HWC.shape
        grid = [1, layout.height // recipe.patch, layout.width // recipe.patch]
        assert expected["image_grid_thw"].tolist() == [grid]


@pytest.mark.parametrize("config", CONFIGS)
def test_qwen2_vl(config: dict[str, object]) -> None:
    check(config, SIZES)


def test_published_sizes_and_long_images() -> None:
    check({}, ((300, 4000), (900, 700)))


def test_extreme_aspects_are_refused() -> None:
    recipe = qwen2_vl.read(Values({}))
    assert recipe.layout(1, 200).tiles == 1
    for size in ((1, 201), (201, 1)):
        with pytest.raises(ImageShapeError, match="more than 200 times longer than wide; send it in pieces, or"):
            recipe.tiles(as_pil(picture(*size, 0)))


def test_limits_are_read_under_each_of_their_names() -> None:
    new, inside = {"shortest_edge": 784, "longest_edge": 78400}, {"min_pixels": 784, "max_pixels": 78400}
    expected = qwen2_vl.read(Values({"size": new}))
    assert (expected.min_pixels, expected.max_pixels) == (784, 78400)
    for values in ({"size": inside}, inside, {**inside, "size": {"shortest_edge": 1, "longest_edge": 2}}):
        assert qwen2_vl.read(Values(values)) == expected


@pytest.mark.parametrize("read", [qwen2_vl.read, idefics3.read])
def test_a_size_of_height_and_width_is_refused(read: Callable[[Values], object]) -> None:
    with pytest.raises(PreprocessorError, match="size must be an object with shortest_edge or longest_edge, not"):
        read(Values({"size": {"height": 56, "width": 56}}))
