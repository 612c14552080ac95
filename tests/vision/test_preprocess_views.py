"""Recipes of one view equal transformers' Pillow processors bit for bit: CLIP, LLaVA, SigLIP, Gemma 3, Pixtral."""

import math

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.vision.preprocess_pictures import SIZES, as_pil, numbers, picture, pictures
from vision.preprocess import clip, common, pixtral
from vision.preprocess.common import ImageShapeError, Recipe
from vision.preprocess.values import PreprocessorError, Values

BIG = ((300, 4000), (1200, 900))
CLIP_CONFIGS = (
    {"size": {"shortest_edge": 30}, "crop_size": {"height": 30, "width": 30}},
    {"size": 41, "crop_size": 33},
    {"size": {"shortest_edge": 20}, "crop_size": {"height": 31, "width": 36}, "resample": 2},
    {"size": {"height": 24, "width": 40}, "do_center_crop": False, "image_mean": [0.1, 0.2, 0.3]},
)
LLAVA_CONFIGS = tuple(
    config | {"do_pad": True} for config in (*CLIP_CONFIGS, {"size": 37, "crop_size": 35, "resample": 0})
)
SIGLIP_CONFIGS = ({"size": {"height": 30, "width": 30}}, {"size": {"height": 45, "width": 28}, "resample": 2})
PIXTRAL_CONFIGS = (
    ({"size": {"longest_edge": 84}}, 28),
    ({"size": {"longest_edge": 100}, "resample": 1}, 16),
    ({"size": {"height": 60, "width": 120}}, 14),
)


def check(recipe: Recipe, processor: object, sizes: tuple[tuple[int, int], ...]) -> None:
    for image_HWC in pictures(sizes):
        expected = processor(as_pil(image_HWC), return_tensors="np")["pixel_values"]  # type: ignore[operator]
        found = numbers(recipe, image_HWC)
        layout = recipe.layout(*image_HWC.shape[:2])
        assert found.dtype == np.float32 and np.array_equal(found, expected), image_HWC.shape
        assert found.shape == (layout.tiles, 3, layout.height, layout.width) and layout.tiles == 1


@pytest.mark.parametrize("config", CLIP_CONFIGS)
def test_clip(config: dict[str, object]) -> None:
    check(clip.read_clip(Values(config)), CLIPImageProcessorPil(**config), SIZES)


@pytest.mark.parametrize("config", LLAVA_CONFIGS)
def test_llava(config: dict[str, object]) -> None:
    check(clip.read_llava(Values(config)), LlavaImageProcessorPil(**config), SIZES)


@pytest.mark.parametrize("band_pixels", [1, 700, 50_000])
def test_bands_of_a_padded_square_do_not_show(band_pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "BAND_PIXELS", band_pixels)
    sizes = ((1, 1), (3, 17), (17, 3), (99, 40), (40, 99), (200, 7), (56, 57), (57, 56), (333, 111))
    for config in (*LLAVA_CONFIGS, {"size": 336, "crop_size": 336, "do_pad": True}):
        check(clip.read_llava(Values(config)), LlavaImageProcessorPil(**config), sizes)


@pytest.mark.parametrize("config", SIGLIP_CONFIGS)
def test_siglip(config: dict[str, object]) -> None:
    check(clip.read_siglip(Values(config)), SiglipImageProcessorPil(**config), SIZES)


@pytest.mark.parametrize("config", SIGLIP_CONFIGS)
def test_gemma3(config: dict[str, object]) -> None:
    check(clip.read_gemma3(Values(config)), Gemma3ImageProcessorPil(**config), SIZES)


@pytest.mark.parametrize(("config", "unit"), PIXTRAL_CONFIGS)
def test_pixtral(config: dict[str, object], unit: int) -> None:
    sizes = tuple(size for size in SIZES if max(size) < 40 * min(size))
    check(pixtral.read(Values(config), unit), PixtralImageProcessorPil(**config, patch_size=unit), sizes)


def test_published_sizes_and_long_images() -> None:
    check(clip.read_clip(Values({})), CLIPImageProcessorPil(), BIG)
    check(clip.read_llava(Values({"do_pad": True})), LlavaImageProcessorPil(do_pad=True), (*BIG, (900, 1200)))
    check(clip.read_siglip(Values({})), SiglipImageProcessorPil(), BIG)
    check(clip.read_gemma3(Values({})), Gemma3ImageProcessorPil(), BIG)
    check(pixtral.read(Values({}), 16), PixtralImageProcessorPil(), BIG)


def test_every_byte_in_every_channel() -> None:
    image_HWC = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    for scale in (1 / 255, 0.00392156862745098, 1 / 127.5, 0.0037):
        config = {"size": 16, "crop_size": 16, "rescale_factor": scale}
        expected = CLIPImageProcessorPil(**config)(as_pil(image_HWC), return_tensors="np")["pixel_values"]
        assert np.array_equal(numbers(clip.read_clip(Values(config)), image_HWC), expected)


def test_a_line_is_refused_before_it_becomes_gigabytes() -> None:
    recipe = clip.read_clip(Values({"size": 336, "crop_size": 336}))
    line = as_pil(picture(1, 4000, 0))
    for call in (lambda: recipe.layout(1, 4000), lambda: recipe.tiles(line)):
        with pytest.raises(ImageShapeError, match=r"4000 x 1 pixels would be resized to 1344000 x 336.*16777216"):
            call()
    padded = clip.read_llava(Values({"size": 336, "crop_size": 336, "do_pad": True}))
    with pytest.raises(
        ImageShapeError, match=r"9000 x 1 pixels would be resized to 9000 x 9000.*67108864 pixels; send it in"
    ):
        padded.layout(1, 9000)
    with pytest.raises(ImageShapeError, match="nothing"):
        pixtral.read(Values({}), 16).tiles(line)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"size": 0}, "size must be an integer from 1 to 16384, not 0"),
        ({"size": {"shortest_edge": 10, "longest_edge": 20}}, "shortest_edge alone"),
        ({"size": {"width": 3}}, "height and width"),
        ({"do_center_crop": False}, "do_center_crop must be true"),
        ({"do_rescale": False}, "do_rescale must be true, not False"),
        ({"resample": 9}, "resample must be one of"),
        ({"resample": [3]}, "resample must be one of"),
        ({"resample": 3.0}, "resample must be one of"),
        ({"image_std": [0, 1, 1]}, "image_std must be positive"),
        ({"image_mean": [0, 1]}, "image_mean must be three numbers"),
        ({"image_mean": [0, 1, math.nan]}, "image_mean must be three numbers"),
        ({"image_std": 10**400}, "image_std must be three numbers"),
        ({"image_std": 5e-324}, "image_std must be positive"),
        ({"rescale_factor": "x"}, "rescale_factor must be a positive number"),
    ],
)
def test_wrong_configurations_name_the_key(config: dict[str, object], message: str) -> None:
    with pytest.raises(PreprocessorError, match=message):
        clip.read_clip(Values(config))
