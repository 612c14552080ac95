"""A checkpoint's files give the recipe and the tokens that transformers' classes give; what does not fit is refused."""

import numpy as np
import pytest
from transformers import (
    Gemma3Config,
    Idefics3Config,
    InternVLConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from model_runtime.models.composites import COMPOSITES
from tests.vision.preprocess_pictures import as_pil, numbers, picture
from vision.config import FAMILIES, TEXT_ONLY, Preprocessor, read_preprocessor
from vision.encoder.readers import READERS, read_vision
from vision.placeholders import Piece
from vision.preprocess.common import ImageShapeError
from vision.preprocess.values import PreprocessorError
from vision.tower_config import VisionTowerConfig

SQUARE = {"size": {"height": 56, "width": 56}}
CUT = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
CLIP_TOWER = {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}
SIGLIP_TOWER = {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
PINPOINTS = [[56, 112], [112, 56], [112, 112]]
TILED = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

CASES: dict[str, tuple[object, object, int]] = {
    # processor, model's configuration, embeddings of a picture of 60 x 100
    "llava clip": (CLIPImageProcessorPil(**CUT), LlavaConfig(vision_config=CLIP_TOWER), 16),
    "llava padded": (LlavaImageProcessorPil(**CUT, do_pad=True), LlavaConfig(vision_config=CLIP_TOWER), 16),
    "llava siglip": (
        SiglipImageProcessorPil(**SQUARE),
        LlavaConfig(vision_config=SIGLIP_TOWER, vision_feature_select_strategy="full"),
        16,
    ),
    "llava with class token": (
        CLIPImageProcessorPil(**CUT),
        LlavaConfig(vision_config=CLIP_TOWER, vision_feature_select_strategy="full"),
        17,
    ),
    "llava pixtral": (
        PixtralImageProcessorPil(size={"longest_edge": 96}),
        LlavaConfig(
            vision_config={"model_type": "pixtral", "patch_size": 16, "image_size": 96},
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        ),
        4 * 6,
    ),
    "llava_next": (
        LlavaNextImageProcessorPil(**CUT, image_grid_pinpoints=PINPOINTS),
        LlavaNextConfig(vision_config=CLIP_TOWER, image_grid_pinpoints=PINPOINTS),
        16 + 4 * (8 + 1),
    ),
    "llava_onevision": (
        LlavaOnevisionImageProcessorPil(**SQUARE, image_grid_pinpoints=PINPOINTS),
        LlavaOnevisionConfig(vision_config=SIGLIP_TOWER, image_grid_pinpoints=PINPOINTS),
        16 + 4 * (8 + 1),
    ),
    "idefics3": (
        Idefics3ImageProcessorPil(**TILED),
        Idefics3Config(vision_config={"image_size": 56, "patch_size": 14}, scale_factor=2),
        5 * 4,
    ),
    "smolvlm": (
        SmolVLMImageProcessorPil(**TILED),
        SmolVLMConfig(vision_config={"image_size": 56, "patch_size": 14}, scale_factor=4),
        5,
    ),
    "qwen2_vl": (Qwen2VLImageProcessorPil(), Qwen2VLConfig(), 2 * 4),
    "qwen2_5_vl": (Qwen2VLImageProcessorPil(), Qwen2_5_VLConfig(), 2 * 4),
    "qwen3_5": (Qwen2VLImageProcessorPil(patch_size=16, **HALF), Qwen3_5Config(), 2 * 3),
    "qwen3_5_moe": (Qwen2VLImageProcessorPil(patch_size=16, **HALF), Qwen3_5MoeConfig(), 2 * 3),
    "qwen3_vl": (Qwen2VLImageProcessorPil(patch_size=16, **HALF), Qwen3VLConfig(), 2 * 3),
    "qwen3_vl_moe": (Qwen2VLImageProcessorPil(patch_size=16, **HALF), Qwen3VLMoeConfig(), 2 * 3),
    "internvl": (
        GotOcr2ImageProcessorPil(**SQUARE, crop_to_patches=True),
        InternVLConfig(vision_config={"image_size": 56, "patch_size": 14}),
        (2 * 3 + 1) * 4,
    ),
    "mistral3": (
        PixtralImageProcessorPil(size={"longest_edge": 84}),
        Mistral3Config(vision_config={"model_type": "pixtral", "patch_size": 14, "image_size": 84}),
        2 * 3,
    ),
    "gemma3": (
        Gemma3ImageProcessorPil(**SQUARE),
        Gemma3Config(vision_config={"image_size": 56, "patch_size": 14}, mm_tokens_per_image=4),
        4,
    ),
}


def read(name: str, **changes: object) -> Preprocessor:
    processor, model, _ = CASES[name]
    return read_preprocessor(processor.to_dict(), None, {**model.to_dict(), **changes})  # type: ignore[attr-defined]


def tower(name: str) -> VisionTowerConfig:
    config = CASES[name][1].to_dict()  # type: ignore[attr-defined]
    vision = config["vision_config"]
    return read_vision(config, vision.get("out_hidden_size") or vision["hidden_size"])


def embeddings(pieces: tuple[Piece, ...]) -> int:
    return sum(piece for piece in pieces if isinstance(piece, int))


@pytest.mark.parametrize("name", CASES)
def test_saved_configurations_give_the_same_pixels(name: str) -> None:
    processor, _, count = CASES[name]
    found, image_HWC = read(name), picture(60, 100, 0)
    options = {"patch_size": 28} if name == "mistral3" else {}
    expected = processor(as_pil(image_HWC), return_tensors="np", **options)["pixel_values"]  # type: ignore[operator]
    pixels = numbers(found.recipe, image_HWC, tower(name))
    assert np.array_equal(pixels, expected.reshape(pixels.shape))
    assert embeddings(found.markup.pieces(found.recipe.layout(60, 100))) == count


def test_every_family_is_tried() -> None:
    tried = {model.to_dict()["model_type"] for _, model, _ in CASES.values()}  # type: ignore[attr-defined]
    # transformers has Kimi's processor for torchvision only: tests/vision/test_preprocess_kimi.py
    assert tried | {"kimi_k25", "kimi_vl"} == set(FAMILIES)


def test_a_family_has_all_its_parts() -> None:
    """Recipe and tokens, tower, and language model are declared apart, for two processes."""
    text_only = {name for name, composite in COMPOSITES.items() if composite.text_only}
    assert text_only == TEXT_ONLY
    assert set(FAMILIES) == set(READERS) == set(COMPOSITES) - text_only


def test_fingerprints_differ_between_recipes_and_are_stable() -> None:
    fingerprints = {name: read(name).fingerprint() for name in CASES}
    # these share recipe, markup and token
    assert fingerprints["qwen2_vl"] == fingerprints["qwen2_5_vl"]
    assert fingerprints["qwen3_vl"] == fingerprints["qwen3_vl_moe"]
    assert fingerprints["qwen3_5"] == fingerprints["qwen3_5_moe"]
    assert len(set(fingerprints.values())) == len(CASES) - 3
    assert fingerprints == {name: read(name).fingerprint() for name in CASES}
    assert all(len(one) == 64 for one in fingerprints.values())


def test_a_nested_image_processor_wins() -> None:
    processor, model, _ = CASES["llava clip"]
    nested = {"image_processor": processor.to_dict()}  # type: ignore[attr-defined]
    old = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 336, "crop_size": 336}
    expected = read("llava clip")
    assert read_preprocessor({}, nested, model.to_dict()) == expected  # type: ignore[attr-defined]
    assert read_preprocessor(old, nested, model.to_dict()) == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("processor", [None, {}, {"processor_class": "LlavaProcessor"}, {"image_processor": {}}])
def test_a_checkpoint_that_does_not_say_how_images_are_resized(processor: dict[str, object] | None) -> None:
    model = CASES["llava clip"][1].to_dict()  # type: ignore[attr-defined]
    with pytest.raises(PreprocessorError, match=r"^preprocessor_config\.json is missing"):
        read_preprocessor({}, processor, model)


@pytest.mark.parametrize("kind", ["CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil", None])
def test_backends_of_a_class_are_one_recipe(kind: str | None) -> None:
    model = CASES["llava clip"][1].to_dict()  # type: ignore[attr-defined]
    assert read_preprocessor({**CUT, "image_processor_type": kind}, None, model) == read("llava clip")


def test_processors_cut_internvl_and_leave_gemma_whole_whatever_the_file_says() -> None:
    for name, option in (("internvl", {"crop_to_patches": False}), ("gemma3", {"do_pan_and_scan": True})):
        processor, model, _ = CASES[name]
        file = {**processor.to_dict(), **option}  # type: ignore[attr-defined]
        assert read_preprocessor(file, None, model.to_dict()) == read(name)  # type: ignore[attr-defined]


def test_gemma_replaces_the_start_token_and_breaks_lines_around_it() -> None:
    found = read("gemma3")
    assert (found.placeholder_id, found.image_token_id) == (255_999, 262_144)
    assert found.around == ("\n\n", "\n\n")
    assert found.markup.pieces(found.recipe.layout(9, 9)) == ("<start_of_image>", 4, "<end_of_image>")


def test_pixtral_takes_its_tokens_from_the_processor() -> None:
    processor, model, _ = CASES["mistral3"]
    names = {"image_break_token": "<break>", "image_end_token": "<end>"}
    found = read_preprocessor(processor.to_dict(), names, model.to_dict())  # type: ignore[attr-defined]
    assert found.markup.pieces(found.recipe.layout(56, 28)) == (1, "<break>", 1, "<end>")


def test_onevision_has_one_view_of_each_of_several_images() -> None:
    found, (processor, _, _) = read("llava_onevision"), CASES["llava_onevision"]
    assert found.for_images(1) is found
    several, images = found.for_images(2), [picture(60, 100, 0), picture(90, 31, 1)]
    pair = [[as_pil(image_HWC) for image_HWC in images]]
    expected = processor(pair, return_tensors="np")["pixel_values"]  # type: ignore[operator]
    assert np.array_equal(np.stack([numbers(several.recipe, image_HWC) for image_HWC in images]), expected)
    assert several.markup.pieces(several.recipe.layout(60, 100)) == (17,)
    assert several.fingerprint() != found.fingerprint()
    assert read("llava clip").for_images(3) == read("llava clip")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llava clip", {"model_type": "blip"}, "model_type 'blip' are not supported; gemma3, idefics3"),
        (
            "llava clip",
            {"vision_config": {**CLIP_TOWER, "image_size": 70}},
            "56 x 56 pixels, but the tower takes 70 x 70",
        ),
        ("llava clip", {"vision_config": {**CLIP_TOWER, "model_type": "vit"}}, "vision_config.model_type 'vit'"),
        ("llava clip", {"vision_config": {**CLIP_TOWER, "patch_size": [14, 7]}}, "patches of 14 x 7"),
        (
            "llava_next",
            {"vision_config": {**CLIP_TOWER, "patch_size": 57}},
            "patches of 57 pixels do not fit into tiles",
        ),
        ("llava clip", {"image_token_id": None, "image_token_index": None}, "lacks image_token_id"),
        ("llava clip", {"image_token_id": -1}, "image_token_id must be a token id, not -1"),
        ("llava clip", {"vision_feature_select_strategy": "cls"}, "must be default or full, not 'cls'"),
        ("llava_next", {"vision_feature_select_strategy": "full"}, "one embedding for each patch"),
        ("llava_next", {"image_grid_pinpoints": [[56, 56]]}, "image_grid_pinpoints differ"),
        ("llava_onevision", {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio must be anyres_max_N, not 'pad'"),
        ("idefics3", {"scale_factor": 3}, "4 x 4 patches do not divide into blocks of scale_factor 3"),
        ("internvl", {"downsample_ratio": 0.4}, "do not divide by downsample_ratio 0.4"),
        ("qwen3_vl", {"vision_config": {"patch_size": 14}}, "are 16, 2, 2, but the tower takes 14, 2, 2"),
        ("qwen2_vl", {"model_type": "idefics3"}, "'Qwen2VLImageProcessor' is not supported for this model; Idefics3"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(PreprocessorError, match=message.replace("[", r"\[")):
        read(name, **changes)


def test_no_image_makes_anything_but_an_answer_or_a_refusal() -> None:
    refused = 0
    for name in CASES:
        found = read(name)
        for height, width in ((1, 1), (1, 16000), (16000, 1), (3, 700)):
            try:
                layout = found.recipe.layout(height, width)
            except ImageShapeError:
                refused += 1
                continue
            assert layout.tiles >= 1 and layout.height > 0 and layout.width > 0
            assert embeddings(found.markup.pieces(layout)) > 0
    assert refused == 4 + 2 + 6 + 18, "lines: CLIP, padded to a square, Pixtral, Qwen"
