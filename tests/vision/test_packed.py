"""Towers over packed images of any size, with mergers, against transformers: 1 and 3 images, alone and batched."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.vision_utils import get_vision_window_index

from tests.vision.towers import QWEN3, check_features, make_encoder, make_model
from vision.encoder.model import ImageInput
from vision.encoder.packed import block_order, resampled_positions, window_order

GRIDS = [(4, 6), (2, 2), (10, 4)]
"""Rows and columns of patches of three images."""


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


QWEN2 = {"depth": 3, "embed_dim": 32, "hidden_size": 24, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
QWEN25 = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 24,
    "fullatt_block_indexes": [1],
}
QWEN: dict[str, tuple[str, dict[str, object]]] = {
    "qwen2": ("qwen2_vl", QWEN2),
    "qwen2_other": ("qwen2_vl", {**QWEN2, "embed_dim": 48, "num_heads": 4, "hidden_act": "gelu", "patch_size": 2}),
    "qwen2.5_window2": ("qwen2_5_vl", {**QWEN25, "window_size": 16}),
    "qwen2.5_window1": ("qwen2_5_vl", {**QWEN25, "window_size": 8, "fullatt_block_indexes": [0, 2]}),
    "qwen2.5_window4": ("qwen2_5_vl", {**QWEN25, "window_size": 32, "depth": 2, "num_heads": 4}),
    "qwen3": ("qwen3_vl", QWEN3),
    "qwen3_side3": ("qwen3_vl", {**QWEN3, "num_position_embeddings": 9, "deepstack_visual_indexes": [1]}),
    "qwen3_flat": ("qwen3_vl", {**QWEN3, "num_position_embeddings": 144, "deepstack_visual_indexes": []}),
}


def qwen_reference(model: PreTrainedModel, patches: list[Tensor], grids: list[tuple[int, int]]) -> list[list[Tensor]]:
    grid_thw = torch.tensor([[1, *grid] for grid in grids])
    with torch.no_grad():
        result = model.model.get_image_features(pixel_values=torch.cat(patches), image_grid_thw=grid_thw)
    levels = result.get("deepstack_features") or []
    return [[vectors, *(level[index] for level in levels)] for index, vectors in enumerate(result.pooler_output)]


@pytest.mark.parametrize("name", QWEN)
@pytest.mark.parametrize("grids", [GRIDS[:1], GRIDS], ids=["one", "three"])
def test_qwen(name: str, grids: list[tuple[int, int]], tmp_path: Path) -> None:
    family, vision = QWEN[name]
    model = make_model({"model_type": family, "vision_config": vision}, f"{family}_text")
    patch_size = model.config.vision_config.patch_size
    patches = [draw(rows * columns, 3 * 2 * patch_size**2) for rows, columns in grids]
    images = [ImageInput(pixels=pixels, grid=grid) for pixels, grid in zip(patches, grids, strict=True)]
    expected = qwen_reference(model, patches, grids)
    batch = check_features(make_encoder(model, tmp_path), images, expected)
    levels = len(vision["deepstack_visual_indexes"]) if family == "qwen3_vl" else 0  # type: ignore[arg-type]
    assert [len(features.deepstack_NO) for features in batch] == [levels] * len(grids)


PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 4,
}
PIXTRALS: dict[str, dict[str, object]] = {
    "llava": {"model_type": "llava", "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "mistral3": {"model_type": "mistral3"},
    "mistral3_bias": {"model_type": "mistral3", "multimodal_projector_bias": True, "spatial_merge_size": 1},
}


@pytest.mark.parametrize("act", ["gelu", "silu"])
@pytest.mark.parametrize("name", PIXTRALS)
@pytest.mark.parametrize("grids", [GRIDS[:1], GRIDS], ids=["one", "three"])
def test_pixtral(name: str, act: str, grids: list[tuple[int, int]], tmp_path: Path) -> None:
    """transformers wants images padded to one size, these do not."""
    heads = {"num_attention_heads": 4} if act == "silu" else {}
    model = make_model({**PIXTRALS[name], "vision_config": {**PIXTRAL, **heads, "hidden_act": act}}, "mistral")
    sizes = [(4 * rows, 4 * columns) for rows, columns in grids]
    padded = draw(len(grids), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    with torch.no_grad():
        result = model.model.get_image_features(pixel_values=padded, image_sizes=torch.tensor(sizes))
    images = [ImageInput(pixels=pixels[None, :, :h, :w]) for pixels, (h, w) in zip(padded, sizes, strict=True)]
    check_features(make_encoder(model, tmp_path), images, [[image] for image in result.pooler_output])


KIMI: dict[str, object] = {
    "patch_size": 4,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 20,
}


@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 4, "pos_emb_height": 3, "pos_emb_width": 3}])
@pytest.mark.parametrize("grids", [GRIDS[:1], GRIDS], ids=["one", "three"])
def test_kimi(changes: dict[str, object], grids: list[tuple[int, int]], tmp_path: Path) -> None:
    """The checkpoint holds fused matrices with neighbouring rotary pairs; transformers takes both apart on loading."""
    vision = {**KIMI, **changes}
    config = {"model_type": "kimi_k25", "vision_config": vision, "projection_hidden_size": 32}
    model = make_model(config, "deepseek_v3")
    patches = [draw(rows * columns, 3, 4, 4) for rows, columns in grids]
    grid_thw = torch.tensor([[1, *grid] for grid in grids])
    with torch.no_grad():
        result = model.model.get_image_features(pixel_values=torch.cat(patches), image_grid_thw=grid_thw)
    images = [ImageInput(pixels=pixels.flatten(1), grid=grid) for pixels, grid in zip(patches, grids, strict=True)]
    check_features(make_encoder(model, tmp_path), images, [[image] for image in result.pooler_output])


def test_block_order_by_hand() -> None:
    order = block_order(2, 4, 2)
    assert order.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert block_order(2, 2, 1).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize("cells", [1, 2, 3, 4])
def test_windows_are_those_of_transformers(cells: int) -> None:
    grids = [(4, 6), (2, 2), (10, 4), (12, 12), (2, 18)]
    order, lengths = window_order(grids, 2, cells)
    grid_thw = torch.tensor([[1, *grid] for grid in grids])
    expected, cumulative = get_vision_window_index(grid_thw, spatial_merge_size=2, window_size=cells * 8, patch_size=4)
    assert order.tolist() == expected.tolist()
    assert lengths == cumulative.diff().tolist()
    assert sum(lengths) == sum(rows * columns for rows, columns in grids)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("grid", [(6, 6), (1, 1), (2, 9), (13, 4)])
def test_resampling_is_interpolation(grid: tuple[int, int], mode: str) -> None:
    """Bilinear with aligned corners, bicubic with aligned edges."""
    table = draw(36, 8)
    square = table.reshape(1, 6, 6, 8).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(square, grid, mode=mode, align_corners=mode == "bilinear")
    actual = resampled_positions(table, grid, bicubic=mode == "bicubic")
    torch.testing.assert_close(actual, expected[0].permute(1, 2, 0), atol=1e-5, rtol=0)
