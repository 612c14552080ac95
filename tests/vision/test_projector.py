"""Projectors by hand, weight tables (each checkpoint tensor used exactly once), and configs that are refused."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from tests.vision.towers import TEXT_HIDDEN_SIZE, make_model, vision_tensors
from vision.encoder.hf_json import Json
from vision.encoder.readers import read_vision
from vision.projector import merge_cells, pack_tiles, unpadded
from vision.tower_config import VisionConfigError, VisionWeightsError
from vision.weights import load_vision, vision_key, vision_table

SMALL: dict[str, object] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CLIP: dict[str, object] = {"model_type": "clip_vision_model", **SMALL, "image_size": 12, "patch_size": 4}
LLAVA: dict[str, object] = {"model_type": "llava", "vision_config": CLIP}


def test_merged_cells_are_joined_row_by_row() -> None:
    numbered = torch.arange(8).reshape(1, 2, 4, 1)
    assert merge_cells(numbered, 2).tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7]]]


def test_unpadding_cuts_what_resizing_added() -> None:
    grid = torch.arange(4 * 6).reshape(1, 4, 6)
    # 10 x 30 pixels fill 2 of 4 rows, 40 x 20 pixels fill 2 of 6 columns, 20 x 30 fill all
    assert unpadded(grid, (10, 30)).tolist() == grid[:, 1:3].tolist()
    assert unpadded(grid, (40, 20)).tolist() == grid[:, :, 2:4].tolist()
    assert unpadded(grid, (20, 30)).tolist() == grid.tolist()


def test_tiles_become_rows_that_end_with_a_newline() -> None:
    tiles = torch.arange(3 * 4).float().reshape(3, 4, 1)
    packed = pack_tiles(tiles, (1, 2), (10, 20), torch.tensor([-1.0]), None)
    assert packed.flatten().tolist() == [0, 1, 2, 3, 4, 5, 8, 9, -1, 6, 7, 10, 11, -1]
    alone = pack_tiles(tiles[:1], (0, 0), (10, 20), torch.tensor([-1.0]), None)
    assert alone.flatten().tolist() == [0, 1, 2, 3, -1]


def test_grids_beyond_the_allowance_are_shrunk() -> None:
    tiles = torch.ones(1 + 6, 9, 2)
    newline = torch.zeros(2)
    # 6 tiles of 3 x 3 where 2 are allowed: sides 6 and 9 are divided by sqrt(3) and rounded down to 3 and 5
    packed = pack_tiles(tiles, (2, 3), (20, 30), newline, 2)
    assert packed.shape == (9 + 3 * (5 + 1), 2)
    assert packed.sum() == 2 * (9 + 3 * 5)
    assert pack_tiles(tiles, (2, 3), (20, 30), newline, 5).shape == (9 + 6 * (9 + 1), 2)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("vision_tower.vision_model.pre_layrnorm.weight", "vision_tower.pre_layrnorm.weight"),
        ("model.vision_tower.vision_model.pre_layrnorm.bias", "vision_tower.pre_layrnorm.bias"),
        ("vision_tower.pre_layrnorm.weight", "vision_tower.pre_layrnorm.weight"),
        ("model.vision_model.post_layernorm.weight", "vision_model.post_layernorm.weight"),
        ("visual.merger.ln_q.weight", "visual.merger.ln_q.weight"),
        ("model.visual.merger.norm.weight", "visual.merger.norm.weight"),
        ("model.image_newline", "image_newline"),
        ("model.connector.modality_projection.proj.weight", "connector.modality_projection.proj.weight"),
        ("model.language_model.embed_tokens.weight", None),
        ("model.layers.0.mlp.up_proj.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_checkpoint_keys_have_one_spelling(key: str, expected: str | None) -> None:
    assert vision_key(key) == expected


def test_weights_are_used_once_and_only_those_declared_unread_are_left(tmp_path: Path) -> None:
    config, tensors = vision_tensors(make_model(LLAVA, "llama"), tmp_path)
    read = read_vision(config, TEXT_HIDDEN_SIZE)
    keys = [key for parameter in vision_table(read) for key in parameter.keys]
    assert len(keys) == len(set(keys))
    left = set(tensors) - set(keys)
    # the second of two blocks is above feature layer -2
    assert {key.split(".")[1] for key in left if not key.startswith("vision_tower.encoder.layers.1.")} == {
        "post_layernorm"
    }
    parameters = load_vision(read, tensors)
    assert parameters["layers.0.qkv.weight"].shape == (48, 16)
    query = tensors["vision_tower.encoder.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(parameters["layers.0.qkv.weight"][:16], query)
    assert "layers.1.qkv.weight" not in parameters


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    config, tensors = vision_tensors(make_model(LLAVA, "llama"), tmp_path)
    read = read_vision(config, TEXT_HIDDEN_SIZE)
    name = "multi_modal_projector.linear_1.weight"
    with pytest.raises(VisionWeightsError, match=f"lacks the image tensor {name}"):
        load_vision(read, {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(VisionWeightsError, match=rf"{name} has shape \(16, 24\), the config asks for \(24, 16\)"):
        load_vision(read, {**tensors, name: tensors[name].T})
    with pytest.raises(VisionWeightsError, match=r"vision_tower\.extra is not used by llava \(1 such\)"):
        load_vision(read, {**tensors, "vision_tower.extra": tensors[name]})
    with pytest.raises(FrozenInstanceError):
        read.family = "other"  # type: ignore[misc]


def changed(vision: Json, **top: object) -> Json:
    return {**LLAVA, **top, "vision_config": {**CLIP, **vision}}


QWEN25: dict[str, object] = {"model_type": "qwen2_5_vl"}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model_type": "paligemma"}, "no image tower for model_type 'paligemma'; llava, "),
        ({}, "no image tower for model_type None"),
        ({"model_type": "llava"}, "vision_config is missing"),
        ({"model_type": "llava", "vision_config": [1]}, r"vision_config must be an object, not \[1\]"),
        (changed({"model_type": "siglip2_vision_model"}), "vision_config.model_type must be clip_vision_model or"),
        (changed({"hidden_act": "relu"}), "vision_config.hidden_act must be gelu or .*, not 'relu'"),
        (changed({"num_attention_heads": 3}), "num_attention_heads must be a divisor of hidden_size, not 3"),
        (changed({"num_hidden_layers": 0}), "num_hidden_layers must be a positive integer, not 0"),
        (changed({"num_hidden_layers": 10**9}), "num_hidden_layers must be at most 4096, not 1000000000"),
        (changed({"image_size": [12, 8]}), r"image_size must be a positive integer, or two equal ones, not \[12, 8\]"),
        (changed({"image_size": 3}), "image_size 3 is less than patch_size 4"),
        (changed({"layer_norm_eps": -1}), "layer_norm_eps must be a positive number"),
        (changed({"layer_norm_eps": 10**400}), r"layer_norm_eps must be at most 1e\+30"),
        (changed({}, vision_feature_layer=7), r"vision_feature_layer \(7,\) does not fit 2 layers"),
        (changed({}, vision_feature_layer=[]), "vision_feature_layer must be an integer or a list"),
        (changed({}, multimodal_projector_bias=1), "multimodal_projector_bias must be true or false, not 1"),
        (changed({}, vision_feature_select_strategy="cls"), "vision_feature_select_strategy must be default or full"),
        (changed({}, model_type="llava_next", vision_feature_select_strategy="full"), "exactly the patches of a tile"),
        (changed({}, model_type="llava_onevision", vision_aspect_ratio="pad"), "must be anyres_max_N, not 'pad'"),
        ({**QWEN25, "vision_config": {"out_hidden_size": 32}}, "out_hidden_size must be 24, not 32"),
        ({**QWEN25, "vision_config": {"out_hidden_size": 24, "window_size": 27}}, "less than one merged cell"),
        ({"model_type": "qwen2_vl", "vision_config": {"hidden_size": 24, "num_heads": 128}}, "heads of 10 cannot"),
        (
            {"model_type": "qwen2_vl", "vision_config": {"hidden_size": 24, "mlp_ratio": 1e308}},
            "mlp_ratio must be at most",
        ),
        (
            {"model_type": "qwen3_vl", "vision_config": {"out_hidden_size": 24, "num_position_embeddings": 50}},
            "num_position_embeddings must be 49, not 50",
        ),
        (
            {"model_type": "qwen3_vl", "vision_config": {"out_hidden_size": 24, "deepstack_visual_indexes": [27]}},
            "deepstack_visual_indexes must rise below 27",
        ),
        (
            {"model_type": "gemma3", "vision_config": {"image_size": 64}, "mm_tokens_per_image": 5},
            r"mm_tokens_per_image must be a square that divides 4\^2",
        ),
        ({"model_type": "mistral3", "vision_config": {"model_type": "pixtral"}}, "text_config is missing"),
        ({"model_type": "kimi_k25", "vision_config": {"pos_emb_width": 8}}, "pos_emb_width must be 64, not 8"),
        (
            {"model_type": "kimi_k25", "vision_config": {"mm_projector_type": "patchmergerv2"}},
            "mm_projector_type must be 'patchmerger', not 'patchmergerv2'",
        ),
        ({"model_type": "kimi_k25", "vision_config": {"mm_hidden_size": 9}}, "mm_hidden_size must be 1152, not 9"),
        (
            {"model_type": "internvl", "vision_config": {"use_mask_token": True}},
            "use_mask_token must be False, not True",
        ),
    ],
)
def test_configs_are_refused_by_key(config: Json, complaint: str) -> None:
    with pytest.raises(VisionConfigError, match=complaint):
        read_vision(config, TEXT_HIDDEN_SIZE)


def test_defaults_fill_what_published_configs_leave_out() -> None:
    """SmolVLM names few keys; LLaVA 1.5 runs 23 of CLIP's 24 blocks; SigLIP's 384 pixels hold 27 patches of 14."""
    smol = {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16}
    read = read_vision({"model_type": "smolvlm", "scale_factor": 4, "vision_config": smol}, 576)
    shapes = {parameter.name: parameter.shape for parameter in vision_table(read)}
    assert shapes["position"] == (1024, 768)
    assert shapes["layers.11.mlp_in.weight"] == (3072, 768) and "layers.12.mlp_in.weight" not in shapes
    assert shapes["projector.first.weight"] == (576, 768 * 16)
    large = {**CLIP, "hidden_size": 1024, "image_size": 336, "num_hidden_layers": 24, "patch_size": 14}
    shapes = {p.name: p.shape for p in vision_table(read_vision({**LLAVA, "vision_config": large}, 4096))}
    assert shapes["position"] == (577, 1024)
    assert "layers.22.qkv.weight" in shapes and "layers.23.qkv.weight" not in shapes
    siglip = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
    shapes = {p.name: p.shape for p in vision_table(read_vision({**LLAVA, "vision_config": siglip}, 896))}
    assert shapes["position"] == (27 * 27, 768)


def test_kimi_has_two_spellings() -> None:
    published = {
        "vt_hidden_size": 64,
        "vt_intermediate_size": 96,
        "vt_num_attention_heads": 4,
        "vt_num_hidden_layers": 2,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "mm_hidden_size": 64,
        "projector_ln_eps": 1e-6,
    }
    renamed = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
    }
    own = read_vision({"model_type": "kimi_k25", "vision_config": published}, 32)
    top = {"projection_hidden_size": 64, "projection_layer_norm_eps": 1e-6}
    assert own == read_vision({"model_type": "kimi_k25", "vision_config": renamed, **top}, 32)
    assert own.projector.norm_eps == 1e-6 and own.tower.num_layers == 2
