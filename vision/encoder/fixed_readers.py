"""Reads the configs of families whose towers are ViTs over square images of one size. Called by `readers.py`.

Runs where the checkpoint is loaded, in the engine process; imports no torch. The only place, with `packed_readers.py`,
that fills in what a config.json leaves out.
"""

from dataclasses import replace

from vision.encoder.hf_json import Json, Section
from vision.tower_config import (
    BlockConfig,
    BlockKeys,
    FixedGridConfig,
    FixedGridKeys,
    MergeConfig,
    MergeKeys,
    PoolConfig,
    TilesConfig,
    VisionConfigError,
    VisionTowerConfig,
)

CLIP_DEFAULTS: Json = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
SIGLIP_DEFAULTS: Json = {
    **CLIP_DEFAULTS,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
IDEFICS3_DEFAULTS: Json = {**SIGLIP_DEFAULTS, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
INTERNVL_DEFAULTS: Json = {
    **SIGLIP_DEFAULTS,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "attention_bias": False,
    "use_qk_norm": False,
    "norm_type": "layer_norm",
    "use_absolute_position_embeddings": True,
    "use_mask_token": False,
    "use_mean_pooling": True,
}
LLAVA_DEFAULTS: Json = {
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
    "multimodal_projector_bias": True,
}
INTERNVL_PROJECTOR_DEFAULTS: Json = {
    "downsample_ratio": 0.5,
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -1,
}
ONEVISION_DEFAULTS: Json = {
    **LLAVA_DEFAULTS,
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
    "vision_aspect_ratio": "anyres_max_9",
}

CLIP_BLOCK = BlockKeys(
    layer="vision_tower.encoder.layers.{}",
    norm1="layer_norm1",
    norm2="layer_norm2",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    mlp_in=("mlp.fc1",),
    mlp_out="mlp.fc2",
)
CLIP_KEYS = FixedGridKeys(
    patch="vision_tower.embeddings.patch_embedding",
    position="vision_tower.embeddings.position_embedding.weight",
    class_token="vision_tower.embeddings.class_embedding",
    pre_norm="vision_tower.pre_layrnorm",
    unread=("vision_tower.post_layernorm.", "vision_tower.embeddings.position_ids"),
)
SIGLIP_KEYS = replace(CLIP_KEYS, class_token=None, pre_norm=None, unread=(*CLIP_KEYS.unread, "vision_tower.head."))
INTERNVL_BLOCK = BlockKeys(
    layer="vision_tower.encoder.layer.{}",
    norm1="layernorm_before",
    norm2="layernorm_after",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.projection_layer",
    mlp_in=("mlp.fc1",),
    mlp_out="mlp.fc2",
)
INTERNVL_KEYS = FixedGridKeys(
    patch="vision_tower.embeddings.patch_embeddings.projection",
    position="vision_tower.embeddings.position_embeddings",
    position_rank=3,
    class_token="vision_tower.embeddings.cls_token",
    class_token_rank=3,
)
MLP_KEYS = MergeKeys(first="multi_modal_projector.linear_1", second="multi_modal_projector.linear_2")


def _clip_like(vision: Section, keys: FixedGridKeys, block: BlockKeys, layers: tuple[int, ...]) -> FixedGridConfig:
    """CLIP, SigLIP and their relatives; `layers` count from the end if negative, as hidden states do."""
    image_size, patch_size = vision.square("image_size"), vision.square("patch_size")
    if image_size < patch_size:
        raise VisionConfigError(f"config.json: image_size {image_size} is less than patch_size {patch_size}")
    count = vision.integer("num_hidden_layers")
    blocks_run = tuple(layer if layer >= 0 else count + 1 + layer for layer in layers)
    if not all(0 <= layer <= count for layer in blocks_run):
        raise VisionConfigError(f"config.json: vision_feature_layer {layers} does not fit {count} layers")
    return FixedGridConfig(
        block=BlockConfig(
            hidden_size=vision.integer("hidden_size"),
            intermediate_size=vision.integer("intermediate_size"),
            num_heads=vision.heads("hidden_size", "num_attention_heads"),
            norm="layer",
            norm_eps=vision.number("layer_norm_eps"),
            activation=vision.activation("hidden_act"),
            keys=block,
        ),
        keys=keys,
        num_layers=count,
        image_size=image_size,
        patch_size=patch_size,
        num_channels=vision.integer("num_channels"),
        patch_bias=keys.class_token is None,
        feature_layers=blocks_run,
        drop_class_token=False,
    )


def mlp(config: Section, in_size: int, out_size: int, bias: bool) -> MergeConfig:
    """The two layers of LLaVA, from patches of in_size to vectors of out_size."""
    return MergeConfig(
        in_size=in_size,
        out_size=out_size,
        hidden_size=out_size,
        keys=MLP_KEYS,
        bias=bias,
        activation=config.activation("projector_hidden_act"),
    )


def _llava_tower(config: Section) -> FixedGridConfig:
    layers = config.layers("vision_feature_layer")
    kind = config.section("vision_config", {}).choice("model_type", ("clip_vision_model", "siglip_vision_model"))
    if kind == "clip_vision_model":
        tower = _clip_like(config.section("vision_config", CLIP_DEFAULTS), CLIP_KEYS, CLIP_BLOCK, layers)
    else:
        tower = _clip_like(config.section("vision_config", SIGLIP_DEFAULTS), SIGLIP_KEYS, CLIP_BLOCK, layers)
    strategy = config.choice("vision_feature_select_strategy", ("default", "full"))
    return replace(tower, drop_class_token=strategy == "default")


def llava(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """LLaVA 1.5 over CLIP or SigLIP."""
    tower = _llava_tower(config)
    projector = mlp(config, tower.feature_size, text_hidden_size, config.flag("multimodal_projector_bias"))
    return VisionTowerConfig(family="llava", tower=tower, projector=projector)


def _tiled(config: Section, text_hidden_size: int, max_tiles: int | None) -> VisionTowerConfig:
    plain = llava(config, text_hidden_size)
    assert isinstance(plain.tower, FixedGridConfig)
    if plain.tower.drop_class_token != (plain.tower.keys.class_token is not None):
        raise VisionConfigError("config.json: vision_feature_select_strategy must leave exactly the patches of a tile")
    return replace(plain, tiles=TilesConfig(newline_key="image_newline", max_tiles=max_tiles))


def llava_next(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """LLaVA-NeXT."""
    return replace(_tiled(config, text_hidden_size, max_tiles=None), family="llava_next")


def onevision(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """LLaVA-OneVision."""
    ratio = config.text("vision_aspect_ratio")
    number = ratio.removeprefix("anyres_max_")
    if not (ratio.startswith("anyres_max_") and number.isdecimal() and int(number) > 0):
        raise VisionConfigError(f"config.json: vision_aspect_ratio must be anyres_max_N, not {ratio!r}")
    return replace(_tiled(config, text_hidden_size, max_tiles=int(number)), family="llava_onevision")


def idefics3(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """Idefics 3."""
    keys = replace(
        SIGLIP_KEYS,
        patch="vision_model.embeddings.patch_embedding",
        position="vision_model.embeddings.position_embedding.weight",
        final_norm="vision_model.post_layernorm",
        unread=("vision_model.embeddings.position_ids",),
    )
    block = replace(CLIP_BLOCK, layer="vision_model.encoder.layers.{}")
    tower = _clip_like(config.section("vision_config", IDEFICS3_DEFAULTS), keys, block, (-1,))
    projector = MergeConfig(
        in_size=tower.feature_size,
        out_size=text_hidden_size,
        hidden_size=text_hidden_size,
        keys=MergeKeys(first="connector.modality_projection.proj"),
        bias=False,
        merge_size=config.integer("scale_factor"),
    )
    return VisionTowerConfig(family="idefics3", tower=replace(tower, bucketised_positions=True), projector=projector)


def smolvlm(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """SmolVLM."""
    return replace(idefics3(config, text_hidden_size), family="smolvlm")


def gemma3(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """Gemma 3: SigLIP with its last norm."""
    keys = replace(SIGLIP_KEYS, final_norm="vision_tower.post_layernorm", unread=SIGLIP_KEYS.unread[1:])
    vision = config.section("vision_config", SIGLIP_DEFAULTS)
    tower = _clip_like(vision, keys, CLIP_BLOCK, (-1,))
    side = round(config.integer("mm_tokens_per_image") ** 0.5)
    if side**2 != config.integer("mm_tokens_per_image") or tower.grid % side:
        raise VisionConfigError(f"config.json: mm_tokens_per_image must be a square that divides {tower.grid}^2")
    projector = PoolConfig(
        in_size=tower.feature_size,
        out_size=text_hidden_size,
        pool_size=tower.grid // side,
        norm_eps=tower.block.norm_eps,
        norm_key="multi_modal_projector.mm_soft_emb_norm.weight",
        matrix_key="multi_modal_projector.mm_input_projection_weight",
    )
    return VisionTowerConfig(family="gemma3", tower=tower, projector=projector)


def internvl(config: Section, text_hidden_size: int) -> VisionTowerConfig:
    """InternVL 3."""
    vision = config.section("vision_config", INTERNVL_DEFAULTS)
    vision.must_be("use_absolute_position_embeddings", True)
    vision.must_be("use_mask_token", False)
    config.must_be("vision_feature_select_strategy", "default")
    layers = config.layers("vision_feature_layer")
    keys = INTERNVL_KEYS
    if not vision.flag("use_mean_pooling"):
        norm = "vision_tower.layernorm"
        keys = replace(keys, final_norm=norm) if layers == (-1,) else replace(keys, unread=(f"{norm}.",))
    tower = _clip_like(vision, keys, INTERNVL_BLOCK, layers)
    block = replace(
        tower.block,
        norm="layer" if vision.choice("norm_type", ("layer_norm", "rms_norm")) == "layer_norm" else "rms",
        qkv_bias=vision.flag("attention_bias"),
        qk_norm=vision.flag("use_qk_norm"),
        layer_scale=True,
    )
    merge_size = round(1 / config.number("downsample_ratio"))
    projector = replace(
        mlp(config, tower.feature_size, text_hidden_size, bias=True),
        keys=replace(MLP_KEYS, norm="multi_modal_projector.layer_norm"),
        merge_size=merge_size,
        norm_after_merge=True,
    )
    tower = replace(tower, block=block, patch_bias=True, drop_class_token=True)
    return VisionTowerConfig(family="internvl", tower=tower, projector=projector)
