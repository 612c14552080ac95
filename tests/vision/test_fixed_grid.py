"""Towers over square images, with their projectors, against transformers: 1 and 3 images, alone and batched."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

from tests.vision.towers import check_features, make_encoder, make_model
from vision.encoder.fixed_grid import bucketised_positions
from vision.encoder.model import ImageInput

SMALL: dict[str, object] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
SIX_HEADS = {**SMALL, "hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2}
CLIP = {"model_type": "clip_vision_model", **SMALL, "image_size": 12, "patch_size": 4}
SIGLIP = {"model_type": "siglip_vision_model", **SMALL, "image_size": 16, "patch_size": 4, "vision_use_head": False}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


LLAVA = {
    "clip": {"vision_config": CLIP},
    "clip_full": {"vision_config": CLIP, "vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    "clip_layers": {"vision_config": CLIP, "vision_feature_layer": [-3, 1, -1], "multimodal_projector_bias": False},
    "clip_other": {"vision_config": {**CLIP, **SIX_HEADS, "hidden_act": "gelu", "image_size": 20}},
    "siglip": {"vision_config": SIGLIP, "vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    "siglip_head": {
        "vision_config": {**SIGLIP, **SIX_HEADS, "vision_use_head": True, "image_size": 14},
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu_pytorch_tanh",
    },
}


@pytest.mark.parametrize("name", LLAVA)
@pytest.mark.parametrize("count", [1, 3])
def test_llava(name: str, count: int, tmp_path: Path) -> None:
    model = make_model({"model_type": "llava", **LLAVA[name]}, "llama")
    size = model.config.vision_config.image_size
    pixels = draw(count, 3, size, size)
    with torch.no_grad():
        expected = model.model.get_image_features(pixel_values=pixels).pooler_output
    images = [ImageInput(pixels=image[None]) for image in pixels]
    check_features(make_encoder(model, tmp_path), images, [[image] for image in expected])


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
@pytest.mark.parametrize(("size", "patch", "scale"), [(16, 4, 2), (18, 3, 3), (20, 5, 4)])
def test_idefics3(family: str, size: int, patch: int, scale: int, tmp_path: Path) -> None:
    """Three images of 1, 3 and 2 tiles."""
    vision = {**SMALL, "image_size": size, "patch_size": patch}
    model = make_model({"model_type": family, "vision_config": vision, "scale_factor": scale}, "llama")
    pixels, counts = draw(3, 3, 3, size, size), [1, 3, 2]
    for index, tiles in enumerate(counts):
        pixels[index, tiles:] = 0
    with torch.no_grad():
        result = model.model.get_image_features(pixel_values=pixels)
    images = [ImageInput(pixels=tiles[:count]) for tiles, count in zip(pixels, counts, strict=True)]
    check_features(make_encoder(model, tmp_path), images, [[image] for image in result.pooler_output])


def test_idefics3_of_a_side_at_which_fractions_round_down(tmp_path: Path) -> None:
    """19 rows of patches: transformers looks some of their positions up in the row before, and so is it done here."""
    vision = {**SMALL, "image_size": 38, "patch_size": 2}
    model = make_model({"model_type": "idefics3", "vision_config": vision, "scale_factor": 1}, "llama")
    pixels = draw(1, 1, 3, 38, 38)
    with torch.no_grad():
        result = model.model.get_image_features(pixel_values=pixels)
    encoder = make_encoder(model, tmp_path)
    check_features(encoder, [ImageInput(pixels=pixels[0])], [[image] for image in result.pooler_output])


def test_bucketised_positions() -> None:
    assert bucketised_positions(4).tolist() == list(range(16))
    rows = bucketised_positions(19).view(19, 19)[:, 0] // 19
    assert [row - index for index, row in enumerate(rows.tolist()) if row != index] == [-1]


INTERNVL = {
    "plain": {},
    "biases": {"attention_bias": True, "use_qk_norm": True, "norm_type": "rms_norm"},
    "final_norm": {"use_mean_pooling": False, **SIX_HEADS},
}


@pytest.mark.parametrize("name", INTERNVL)
@pytest.mark.parametrize("layer", [-1, -2])
def test_internvl(name: str, layer: int, tmp_path: Path) -> None:
    """Three images of 1, 3 and 2 tiles."""
    vision = {**SMALL, "image_size": [16, 16], "patch_size": [4, 4], **INTERNVL[name]}
    config = {"model_type": "internvl", "vision_config": vision, "vision_feature_layer": layer}
    model = make_model(config, "qwen2")
    pixels = draw(6, 3, 16, 16)
    with torch.no_grad():
        tiles = model.model.get_image_features(pixel_values=pixels).pooler_output
    images = [ImageInput(pixels=part) for part in pixels.split([1, 3, 2])]
    expected = [[part.flatten(0, 1)] for part in tiles.split([1, 3, 2])]
    check_features(make_encoder(model, tmp_path), images, expected)


@pytest.mark.parametrize(("size", "tokens"), [(16, 4), (16, 16), (24, 9)])
def test_gemma3(size: int, tokens: int, tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3",
        "vision_config": {**SIGLIP, "image_size": size},
        "mm_tokens_per_image": tokens,
    }
    model = make_model(config, "gemma3_text")
    pixels = draw(3, 3, size, size)
    with torch.no_grad():
        expected = model.model.get_image_features(pixel_values=pixels).pooler_output
    images = [ImageInput(pixels=image[None]) for image in pixels]
    batch = check_features(make_encoder(model, tmp_path), images, [[image] for image in expected])
    assert batch[0].embeddings_NO.shape == (tokens, 24)


PINPOINTS = [[12, 24], [24, 12], [24, 24], [36, 12], [12, 36]]
SIZES = [(10, 40), (37, 11), (20, 21)]


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision", "shrunk"])
def test_any_resolution(family: str, tmp_path: Path) -> None:
    """Wide, tall and nearly square images in grids of 1 x 3, 3 x 1 and 2 x 2 tiles."""
    vision = CLIP if family == "llava_next" else {**SIGLIP, "image_size": 12}
    config = {"model_type": "llava_next" if family == "llava_next" else "llava_onevision", "vision_config": vision}
    if family == "shrunk":
        config["vision_aspect_ratio"] = "anyres_max_2"
    model = make_model({**config, "image_grid_pinpoints": PINPOINTS}, "llama")
    grids = [get_anyres_image_grid_shape(size, PINPOINTS, 12) for size in SIZES]
    counts = [1 + rows * columns for rows, columns in grids]
    assert grids == [(1, 3), (3, 1), (2, 2)]
    pixels = draw(3, max(counts), 3, 12, 12)
    with torch.no_grad():
        result = model.model.get_image_features(pixel_values=pixels, image_sizes=torch.tensor(SIZES))
    images = [
        ImageInput(pixels=tiles[:count], tile_grid=grid, size=size)
        for tiles, count, grid, size in zip(pixels, counts, grids, SIZES, strict=True)
    ]
    check_features(make_encoder(model, tmp_path), images, [[image] for image in result.pooler_output])


def test_any_resolution_of_several_images(tmp_path: Path) -> None:
    """OneVision gives each of several images of one prompt its small copy alone, and one newline."""
    config = {"model_type": "llava_onevision", "vision_config": {**SIGLIP, "image_size": 12}}
    model = make_model({**config, "image_grid_pinpoints": PINPOINTS}, "llama")
    pixels, sizes = draw(3, 1, 3, 12, 12), torch.tensor(SIZES)
    with torch.no_grad():
        result = model.model.get_image_features(
            pixel_values=pixels, image_sizes=sizes, batch_num_images=torch.tensor([3])
        )
    images = [ImageInput(pixels=tiles, size=size) for tiles, size in zip(pixels, SIZES, strict=True)]
    batch = check_features(make_encoder(model, tmp_path), images, [[image] for image in result.pooler_output])
    assert batch[0].embeddings_NO.shape == (9 + 1, 24)
