"""Reads the image side of Kimi K2.5 and of Kimi-VL: MoonViT and its patch merger. Called by `readers.py`.

Runs where the checkpoint is loaded, in the engine process; imports no torch.
"""

from vision.encoder.hf_json import Json, Section
from vision.encoder.packed_readers import head_dim_checked, rope_theta
from vision.tower_config import BlockConfig, BlockKeys, MergeConfig, MergeKeys, PackedConfig, VisionTowerConfig

CHANNELS = 3
EPS = 1e-5

DEFAULTS: Json = {
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "merge_kernel_size": (2, 2),
    "merge_type": "sd2_tpool",
    "pos_emb_type": "divided_fixed",
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
}
PROJECTOR_DEFAULTS: Json = {"projection_layer_norm_eps": EPS}
PUBLISHED = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
}
"""How Moonshot's own config.json spells what transformers calls otherwise."""

BLOCK = BlockKeys(
    layer="vision_tower.encoder.blocks.{}",
    norm1="norm0",
    norm2="norm1",
    qkv=("wqkv",),
    out="wo",
    mlp_in=("mlp.fc0",),
    mlp_out="mlp.fc1",
)

K25_MERGER = MergeKeys(norm="mm_projector.pre_norm", first="mm_projector.proj.0", second="mm_projector.proj.2")
VL_MERGER = MergeKeys(
    norm="multi_modal_projector.pre_norm",
    first="multi_modal_projector.linear_1",
    second="multi_modal_projector.linear_2",
)


def kimi_k25(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """Kimi K2.5, in transformers' spelling or in Moonshot's, which keeps the projector's settings with the tower's."""
    return _kimi("kimi_k25", config, text_hidden_size, K25_MERGER)


def kimi_vl(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """Kimi-VL, which transformers does not have: for single images the same tower, and a merger under other names."""
    return _kimi("kimi_vl", config, text_hidden_size, VL_MERGER)


def _kimi(family: str, config: Section, text_hidden_size: int, merger: MergeKeys) -> VisionTowerConfig:
    vision = config.section("vision_config", DEFAULTS, PUBLISHED)
    for key in ("merge_type", "pos_emb_type", "mm_projector_type", "projector_hidden_act"):
        vision.must_be(key, DEFAULTS[key])
    side, patch_size = vision.integer("pos_emb_height"), vision.integer("patch_size")
    vision.must_be("pos_emb_width", side)
    width, merge_size = vision.integer("hidden_size"), vision.square("merge_kernel_size")
    for section, key in ((config, "projection_hidden_size"), (vision, "mm_hidden_size")):
        if section.has(key):
            section.must_be(key, width)
    has_eps = vision.has("projector_ln_eps")
    block = BlockConfig(
        hidden_size=width,
        intermediate_size=vision.integer("intermediate_size"),
        num_heads=vision.heads("hidden_size", "num_attention_heads"),
        norm="layer",
        norm_eps=EPS,
        activation=vision.activation("hidden_act"),
        keys=BLOCK,
    )
    tower = PackedConfig(
        block=head_dim_checked(block),
        num_layers=vision.integer("num_hidden_layers"),
        patch_size=patch_size,
        patch_width=CHANNELS * patch_size**2,
        patch_key="vision_tower.patch_embed.proj",
        patch_bias=True,
        patch_rank=4,
        merge_size=merge_size,
        rope_theta=rope_theta(vision),
        axial="interleaved",
        layout="rows",
        final_norm_key="vision_tower.encoder.final_layernorm",
        position_key="vision_tower.patch_embed.pos_emb.weight",
        position_side=side,
        position_bicubic=True,
        position_rank=3,
    )
    projector = MergeConfig(
        in_size=width,
        out_size=text_hidden_size,
        hidden_size=width * merge_size**2,
        keys=merger,
        bias=True,
        merge_size=merge_size,
        norm_eps=vision.number("projector_ln_eps") if has_eps else config.number("projection_layer_norm_eps"),
    )
    return VisionTowerConfig(family=family, tower=tower, projector=projector)
