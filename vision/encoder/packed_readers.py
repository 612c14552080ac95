"""Reads the configs of families whose towers pack images of any size. Called by `readers.py`.

Runs where the checkpoint is loaded, in the engine process; imports no torch. The only place, with `fixed_readers.py`,
that fills in what a config.json leaves out.
"""

from dataclasses import replace

from vision.encoder.fixed_readers import MLP_KEYS, mlp
from vision.encoder.hf_json import Json, Section
from vision.tower_config import (
    BlockConfig,
    BlockKeys,
    MergeConfig,
    MergeKeys,
    PackedConfig,
    VisionConfigError,
    VisionTowerConfig,
)

QWEN_EPS = 1e-6
PIXTRAL_EPS = 1e-5
FRAMES = 2
"""Images are repeated to fill the two frames of Qwen's patches."""

QWEN2_DEFAULTS: Json = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": FRAMES,
}
QWEN25_DEFAULTS: Json = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": FRAMES,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
QWEN3_DEFAULTS: Json = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": FRAMES,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
PIXTRAL_DEFAULTS: Json = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
    "hidden_act": "gelu",
}
MISTRAL3_DEFAULTS: Json = {
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "multimodal_projector_bias": False,
    "spatial_merge_size": 2,
}

QWEN2_BLOCK = BlockKeys(
    layer="visual.blocks.{}",
    norm1="norm1",
    norm2="norm2",
    qkv=("attn.qkv",),
    out="attn.proj",
    mlp_in=("mlp.fc1",),
    mlp_out="mlp.fc2",
)
QWEN25_BLOCK = replace(QWEN2_BLOCK, mlp_in=("mlp.gate_proj", "mlp.up_proj"), mlp_out="mlp.down_proj")
QWEN3_BLOCK = replace(QWEN2_BLOCK, mlp_in=("mlp.linear_fc1",), mlp_out="mlp.linear_fc2")
PIXTRAL_BLOCK = BlockKeys(
    layer="vision_tower.transformer.layers.{}",
    norm1="attention_norm",
    norm2="ffn_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    mlp_in=("feed_forward.gate_proj", "feed_forward.up_proj"),
    mlp_out="feed_forward.down_proj",
)
QWEN2_MERGER = MergeKeys(norm="visual.merger.ln_q", first="visual.merger.mlp.0", second="visual.merger.mlp.2")


def rope_theta(vision: Section) -> float:
    """From either spelling; 10 000 if there is none."""
    if vision.has("rope_parameters"):
        return vision.section("rope_parameters", {"rope_theta": 10000.0}).number("rope_theta")
    return vision.number("rope_theta") if vision.has("rope_theta") else 10000.0


def head_dim_checked(block: BlockConfig) -> BlockConfig:
    """The block, if its heads can hold angles for rows and columns."""
    if block.head_dim % 4:
        raise VisionConfigError(f"config.json: vision_config: heads of {block.head_dim} cannot hold rows and columns")
    return block


def _qwen_tower(vision: Section, block: BlockConfig, patch_bias: bool) -> PackedConfig:
    patch_size = vision.square("patch_size")
    vision.must_be("temporal_patch_size", FRAMES)
    return PackedConfig(
        block=head_dim_checked(block),
        num_layers=vision.integer("depth"),
        patch_size=patch_size,
        patch_width=vision.integer("in_channels") * FRAMES * patch_size**2,
        patch_key="visual.patch_embed.proj",
        patch_bias=patch_bias,
        patch_rank=5,
        merge_size=vision.integer("spatial_merge_size"),
        rope_theta=rope_theta(vision),
    )


def _qwen_merger(tower: PackedConfig, out_size: int, keys: MergeKeys) -> MergeConfig:
    width = tower.block.hidden_size
    return MergeConfig(
        in_size=width,
        out_size=out_size,
        hidden_size=width * tower.merge_size**2,
        keys=keys,
        bias=True,
        merge_size=tower.merge_size,
        norm=tower.block.norm,
        norm_eps=QWEN_EPS,
    )


def qwen2_vl(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """Qwen2-VL."""
    vision = config.section("vision_config", QWEN2_DEFAULTS)
    vision.must_be("hidden_size", text_hidden_size)
    block = BlockConfig(
        hidden_size=vision.integer("embed_dim"),
        intermediate_size=int(vision.integer("embed_dim") * vision.number("mlp_ratio")),
        num_heads=vision.heads("embed_dim", "num_heads"),
        norm="layer",
        norm_eps=QWEN_EPS,
        activation=vision.activation("hidden_act"),
        keys=QWEN2_BLOCK,
    )
    tower = _qwen_tower(vision, block, patch_bias=False)
    return VisionTowerConfig(
        family="qwen2_vl", tower=tower, projector=_qwen_merger(tower, text_hidden_size, QWEN2_MERGER)
    )


def _qwen_block(vision: Section, keys: BlockKeys) -> BlockConfig:
    return BlockConfig(
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
        num_heads=vision.heads("hidden_size", "num_heads"),
        norm="layer",
        norm_eps=QWEN_EPS,
        activation=vision.activation("hidden_act"),
        keys=keys,
    )


def qwen2_5_vl(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """Qwen2.5-VL: windows, RMS norms, gated MLP."""
    vision = config.section("vision_config", QWEN25_DEFAULTS)
    vision.must_be("out_hidden_size", text_hidden_size)
    block = replace(_qwen_block(vision, QWEN25_BLOCK), norm="rms", gated=True)
    tower = _qwen_tower(vision, block, patch_bias=False)
    window_cells = vision.integer("window_size") // tower.merge_size // tower.patch_size
    if not window_cells:
        raise VisionConfigError("config.json: vision_config.window_size is less than one merged cell")
    full = frozenset(vision.integers("fullatt_block_indexes"))
    tower = replace(tower, window_cells=window_cells, full_attention_layers=full)
    return VisionTowerConfig(
        family="qwen2_5_vl", tower=tower, projector=_qwen_merger(tower, text_hidden_size, QWEN2_MERGER)
    )


def _qwen3_merger_keys(prefix: str) -> MergeKeys:
    return MergeKeys(norm=f"{prefix}.norm", first=f"{prefix}.linear_fc1", second=f"{prefix}.linear_fc2")


def qwen3_vl(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """Qwen3-VL: learned positions besides the rotary ones, and deepstack."""
    return _qwen3(config.section("vision_config", QWEN3_DEFAULTS), text_hidden_size)


def qwen3_5(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """Qwen3.5: the same without deepstack."""
    return _qwen3(config.section("vision_config", {**QWEN3_DEFAULTS, "deepstack_visual_indexes": ()}), text_hidden_size)


def _qwen3(vision: Section, text_hidden_size: int) -> VisionTowerConfig:
    vision.must_be("out_hidden_size", text_hidden_size)
    layers, depth = vision.integers("deepstack_visual_indexes"), vision.integer("depth")
    if list(layers) != sorted(set(layers)) or not all(0 <= layer < depth for layer in layers):
        raise VisionConfigError(f"config.json: vision_config.deepstack_visual_indexes must rise below {depth}")
    side = round(vision.integer("num_position_embeddings") ** 0.5)
    vision.must_be("num_position_embeddings", side**2)
    tower = replace(
        _qwen_tower(vision, _qwen_block(vision, QWEN3_BLOCK), patch_bias=True),
        position_key="visual.pos_embed.weight",
        position_side=side,
        deepstack_layers=layers,
    )
    merger = _qwen_merger(tower, text_hidden_size, _qwen3_merger_keys("visual.merger"))
    deepstack = tuple(
        replace(merger, keys=_qwen3_merger_keys(f"visual.deepstack_merger_list.{index}"), norm_after_merge=True)
        for index in range(len(layers))
    )
    return VisionTowerConfig(family="qwen3_vl", tower=tower, projector=merger, deepstack=deepstack)


def _pixtral_tower(config: Section, merge_size: int) -> PackedConfig:
    vision = config.section("vision_config", PIXTRAL_DEFAULTS)
    vision.must_be("model_type", "pixtral")
    config.must_be("vision_feature_layer", -1)
    patch_size = vision.square("patch_size")
    block = BlockConfig(
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
        num_heads=vision.heads("hidden_size", "num_attention_heads"),
        norm="rms",
        norm_eps=PIXTRAL_EPS,
        activation=vision.activation("hidden_act"),
        keys=PIXTRAL_BLOCK,
        gated=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )
    if vision.has("head_dim"):
        vision.must_be("head_dim", block.head_dim)
    return PackedConfig(
        block=head_dim_checked(block),
        num_layers=vision.integer("num_hidden_layers"),
        patch_size=patch_size,
        patch_width=vision.integer("num_channels") * patch_size**2,
        patch_key="vision_tower.patch_conv",
        patch_bias=False,
        patch_rank=4,
        merge_size=merge_size,
        rope_theta=rope_theta(vision),
        axial="staggered",
        layout="pixels",
        pre_norm_key="vision_tower.ln_pre",
    )


def llava_pixtral(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """Pixtral in the clothes of LLaVA."""
    config.must_be("vision_feature_select_strategy", "full")
    tower = _pixtral_tower(config, merge_size=1)
    projector = mlp(config, tower.block.hidden_size, text_hidden_size, config.flag("multimodal_projector_bias"))
    return VisionTowerConfig(family="llava", tower=tower, projector=projector)


def mistral3(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """Mistral 3: Pixtral's tower, then patches merged channel by channel."""
    tower = _pixtral_tower(config, config.integer("spatial_merge_size"))
    projector = replace(
        mlp(config, tower.block.hidden_size, text_hidden_size, config.flag("multimodal_projector_bias")),
        keys=replace(
            MLP_KEYS,
            norm="multi_modal_projector.norm",
            merging="multi_modal_projector.patch_merger.merging_layer",
        ),
        merge_size=tower.merge_size,
        norm="rms",
        norm_eps=config.section("text_config", {}).number("rms_norm_eps"),
        channel_major=True,
    )
    return VisionTowerConfig(family="mistral3", tower=tower, projector=projector)
