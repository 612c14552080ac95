"""Recipes that cut tiles equal transformers' Pillow processors bit for bit.

LLaVA-NeXT, LLaVA-OneVision, Idefics3 and SmolVLM, InternVL.
"""

import numpy as np
import pytest
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.vision.preprocess_pictures import SIZES, as_pil, numbers, picture, pictures
from vision.preprocess import idefics3, internvl, llava_next
from vision.preprocess.common import Recipe
from vision.preprocess.values import PreprocessorError, Values

BIG = ((300, 4000), (500, 700))


def grid(tile: int, *pairs: tuple[int, int]) -> list[list[int]]:
    return [[tile * rows, tile * cols] for rows, cols in pairs]


NEXT_CONFIGS = (
    {
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
        "image_grid_pinpoints": grid(28, (1, 2), (2, 1), (2, 2), (3, 1), (1, 3)),
    },
    {"size": {"shortest_edge": 30}, "crop_size": 20, "image_grid_pinpoints": grid(20, (2, 1), (1, 4)), "resample": 2},
    {
        "size": {"height": 33, "width": 25},
        "crop_size": {"height": 24, "width": 24},
        "image_grid_pinpoints": grid(24, (2, 3)),
    },
)
ONEVISION_CONFIGS = (
    {
        "size": {"height": 24, "width": 24},
        "image_grid_pinpoints": grid(24, *[(a, b) for a in range(1, 5) for b in range(1, 5)]),
    },
    {"size": {"height": 30, "width": 30}, "image_grid_pinpoints": grid(30, (1, 1), (2, 2), (1, 6)), "resample": 2},
)
IDEFICS_CONFIGS = (
    {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}},
    {"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 32}, "resample": 3},
    {"size": {"longest_edge": 28}, "max_image_size": {"longest_edge": 28}},
    {"size": {"longest_edge": 90}, "max_image_size": {"longest_edge": 30}, "do_image_splitting": False},
)
INTERNVL_CONFIGS = (
    {"size": {"height": 28, "width": 28}, "crop_to_patches": True},
    {"size": {"height": 24, "width": 30}, "crop_to_patches": True, "min_patches": 2, "max_patches": 6, "resample": 2},
    {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 1},
)


def check(recipe: Recipe, processor: object, sizes: tuple[tuple[int, int], ...]) -> set[int]:
    """Compares; returns the numbers of tiles that occurred."""
    counts = set()
    for image_HWC in pictures(sizes):
        expected = processor(as_pil(image_HWC), return_tensors="np")["pixel_values"]  # type: ignore[operator]
        found = numbers(recipe, image_HWC)
        layout = recipe.layout(*image_HWC.shape[:2])
        assert found.dtype == np.float32, image_HWC.shape
        assert np.array_equal(found, expected.reshape(-1, *expected.shape[-3:])), image_HWC.shape
        assert found.shape == (layout.tiles, 3, layout.height, layout.width)
        counts.add(layout.tiles)
    return counts


@pytest.mark.parametrize("config", NEXT_CONFIGS)
def test_llava_next(config: dict[str, object]) -> None:
    recipe = llava_next.read_llava_next(Values(config))
    assert check(recipe, LlavaNextImageProcessorPil(**config), SIZES) <= {3, 4, 5, 7}


@pytest.mark.parametrize("config", ONEVISION_CONFIGS)
def test_llava_onevision(config: dict[str, object]) -> None:
    recipe = llava_next.read_llava_onevision(Values(config))
    assert len(check(recipe, LlavaOnevisionImageProcessorPil(**config), SIZES)) > 2


@pytest.mark.parametrize("config", ONEVISION_CONFIGS)
def test_llava_onevision_with_several_images_takes_one_square_view_of_each(config: dict[str, object]) -> None:
    recipe, processor = llava_next.read_llava_onevision(Values(config)), LlavaOnevisionImageProcessorPil(**config)
    images = list(pictures())
    expected = processor([[as_pil(image_HWC) for image_HWC in images]], return_tensors="np")["pixel_values"]
    found = [numbers(recipe.one_of_many(), image_HWC) for image_HWC in images]
    assert np.array_equal(np.stack(found), expected)


@pytest.mark.parametrize("processor", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
@pytest.mark.parametrize("config", IDEFICS_CONFIGS)
def test_idefics3(config: dict[str, object], processor: type) -> None:
    assert max(check(idefics3.read(Values(config)), processor(**config), SIZES)) in {1, 17}


def test_idefics3_rows_and_columns_and_a_mask_of_ones() -> None:
    config = IDEFICS_CONFIGS[1]
    recipe, processor = idefics3.read(Values(config)), Idefics3ImageProcessorPil(**config, return_row_col_info=True)
    for image_HWC in pictures():
        expected = processor(as_pil(image_HWC), return_tensors="np")
        layout = recipe.layout(*image_HWC.shape[:2])
        assert (layout.rows, layout.cols) == (expected["rows"][0][0], expected["cols"][0][0])
        assert expected["pixel_attention_mask"].all()


@pytest.mark.parametrize("config", INTERNVL_CONFIGS)
def test_internvl(config: dict[str, object]) -> None:
    recipe, processor = internvl.read(Values(config)), GotOcr2ImageProcessorPil(**config)
    check(recipe, processor, SIZES)
    for height in range(1, 200, 13):
        for width in range(1, 200, 11):
            assert recipe.layout(height, width).tiles == processor.get_number_of_image_patches(height, width, {})


def test_published_sizes_and_long_images() -> None:
    check(
        llava_next.read_llava_next(Values({"size": 336, "crop_size": 336})),
        LlavaNextImageProcessorPil(size=336, crop_size=336),
        BIG,
    )
    check(llava_next.read_llava_onevision(Values({})), LlavaOnevisionImageProcessorPil(), BIG)
    check(idefics3.read(Values({})), Idefics3ImageProcessorPil(), BIG)
    check(internvl.read(Values({"crop_to_patches": True})), GotOcr2ImageProcessorPil(crop_to_patches=True), BIG)


def test_a_large_longest_edge_is_bounded() -> None:
    config = {"size": {"longest_edge": 5000}, "max_image_size": {"longest_edge": 364}}
    check(idefics3.read(Values(config)), Idefics3ImageProcessorPil(**config), ((20, 600), (600, 20)))


def test_pinpoints_must_be_whole_tiles() -> None:
    for pinpoints in ([[28, 30]], [], [[28]], [[28, 28 * 65]], "x"):
        with pytest.raises(PreprocessorError, match="image_grid_pinpoints must be 1 to 256 pairs of multiples of 28"):
            llava_next.read_llava_next(Values({**NEXT_CONFIGS[0], "image_grid_pinpoints": pinpoints}))


def test_recipes_leave_the_image_as_it_was() -> None:
    image_HWC = picture(60, 90, 0)
    image = as_pil(image_HWC)
    idefics3.read(Values(IDEFICS_CONFIGS[0])).tiles(image)
    assert np.array_equal(np.asarray(image), image_HWC)
