"""The table of tiny vision-language checkpoints that `tests/vlm.py` writes: a row says what distinguishes one.

Pictures become 1 to 64 embeddings; weights are wide enough that every flag shows in the logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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

from tests import vlm_templates as templates

Values = Mapping[str, Any]

HIDDEN = 64
TOWER: Values = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
CLIP: Values = {**TOWER, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 7}
SIGLIP: Values = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL: Values = {**TOWER, "model_type": "pixtral", "image_size": 56, "patch_size": 8, "head_dim": 16}
SQUARE: Values = {"size": {"height": 28, "width": 28}}
CUT: Values = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
HALF: Values = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PINPOINTS = [[28, 56], [56, 28], [56, 56], [28, 84]]
MROPE: Values = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
GEMMA_ROPE: Values = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vlm:
    """What distinguishes a checkpoint. The first three special tokens are padding, begin and end."""

    family: str
    text: Values
    """Its model_type, and what differs from `tests.vlm.TEXT`."""
    vision: Values
    processor: Any
    """An image processor of transformers, or the values of one that needs torchvision."""
    template: str
    tokens: tuple[str, ...]
    ids: Values
    """Keys of config.json that hold the id of a token."""
    config: Values = field(default_factory=dict)
    seed: int = 0
    """Of the weights: another where two tokens happened to be nearly as likely."""
    nested: bool = False
    """The image processor's values stand in processor_config.json."""


def _llava(**changes: Any) -> Vlm:
    values: dict[str, Any] = {
        "family": "llava",
        "text": {"model_type": "llama"},
        "vision": CLIP,
        "processor": CLIPImageProcessorPil(**CUT),
        "template": templates.LLAVA,
        "tokens": (*templates.CHAT, "<image>"),
        "ids": {"image_token_index": "<image>"},
    }
    return Vlm(**{**values, **changes})


def _pixtral(**changes: Any) -> Vlm:
    return Vlm(
        **{
            "text": {"model_type": "mistral"},
            "vision": PIXTRAL,
            "processor": PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size={"height": 8, "width": 8}),
            "template": templates.PIXTRAL,
            "tokens": templates.MISTRAL_TOKENS,
            "ids": {"image_token_index": "[IMG]"},
            **changes,
        }
    )


def _idefics(family: str, processor: Any, **config: Any) -> Vlm:
    return Vlm(
        family=family,
        text={"model_type": "llama"},
        vision={**TOWER, "image_size": 28, "patch_size": 7},
        processor=processor,
        template=templates.IDEFICS3,
        tokens=templates.IDEFICS_TOKENS,
        ids={"image_token_id": "<image>"},
        config=config,
    )


def _qwen(family: str, vision: Values, text: Values, processor: Values, **config: Any) -> Vlm:
    limits = {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 24}
    return Vlm(
        family=family,
        text={"model_type": f"{family}_text", "rope_parameters": MROPE, **text},
        vision={"depth": 4, "num_heads": 2, "patch_size": 4, **vision},
        processor=Qwen2VLImageProcessorPil(patch_size=4, size=limits, **processor),
        template=templates.QWEN,
        tokens=templates.QWEN_TOKENS,
        ids={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        config=config,
    )


QWEN2: Values = {"embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2}
QWEN25: Values = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "out_hidden_size": HIDDEN,
    "window_size": 16,
    "fullatt_block_indexes": [1, 3],
}
QWEN3: Values = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
PLAIN_QWEN3: Values = {key: value for key, value in QWEN3.items() if key != "deepstack_visual_indexes"}
EXPERTS: Values = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
STATES: Values = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
}
INTERLEAVED: Values = {"rope_parameters": {**MROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True}}


def _gemma3(sliding_window: int, **text: Any) -> Vlm:
    return Vlm(
        family="gemma3",
        text={
            "model_type": "gemma3_text",
            "sliding_window": sliding_window,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": GEMMA_ROPE,
            "query_pre_attn_scalar": 24,
            **text,
        },
        vision={**SIGLIP, "image_size": 56},
        processor=Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
        template=templates.GEMMA3,
        tokens=templates.GEMMA_TOKENS,
        ids={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        config={"mm_tokens_per_image": 16, "tie_word_embeddings": True},
    )


KIMI_TEXT: Values = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
KIMI_PROCESSOR: Values = {
    "image_processor_type": "Kimi_K25ImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "max_patches": 96,
    "size": {"max_height": 20, "max_width": 20},
    **HALF,
}

CASES: Mapping[str, Vlm] = {
    "llava-clip": _llava(),
    "llava-clip-full": _llava(
        processor=LlavaImageProcessorPil(**CUT, do_pad=True),
        config={"vision_feature_select_strategy": "full", "tie_word_embeddings": True},
    ),
    "llava-siglip": _llava(
        vision=SIGLIP,
        processor=SiglipImageProcessorPil(**SQUARE),
        config={"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        nested=True,
        seed=1,
    ),
    "llava-pixtral": _pixtral(
        family="llava", config={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    ),
    "llava_next": _llava(
        family="llava_next",
        text={"model_type": "mistral", "sliding_window": 24},
        processor=LlavaNextImageProcessorPil(**CUT, image_grid_pinpoints=PINPOINTS),
        template=templates.LLAVA_NEXT,
        config={"image_grid_pinpoints": PINPOINTS},
    ),
    "llava_onevision": _llava(
        family="llava_onevision",
        text={"model_type": "qwen2"},
        vision=SIGLIP,
        processor=LlavaOnevisionImageProcessorPil(**SQUARE, image_grid_pinpoints=PINPOINTS),
        template=templates.ONEVISION,
        ids={"image_token_index": "<image>", "video_token_index": "<|endoftext|>"},
        config={"image_grid_pinpoints": PINPOINTS, "vision_aspect_ratio": "anyres_max_2"},
    ),
    "idefics3": _idefics(
        "idefics3",
        Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
    ),
    "idefics3-whole": _idefics(
        "idefics3",
        Idefics3ImageProcessorPil(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, do_image_splitting=False
        ),
        tie_word_embeddings=True,
    ),
    "smolvlm": _idefics(
        "smolvlm",
        SmolVLMImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
        scale_factor=4,
    ),
    "internvl": Vlm(
        family="internvl",
        text={"model_type": "qwen2"},
        vision={**TOWER, "image_size": [28, 28], "patch_size": [7, 7], "attention_bias": True},
        processor=GotOcr2ImageProcessorPil(**SQUARE, crop_to_patches=True, max_patches=4),
        template=templates.INTERNVL,
        tokens=(*templates.CHAT, "<img>", "</img>", "<IMG_CONTEXT>"),
        ids={"image_token_id": "<IMG_CONTEXT>"},
        config={"tie_word_embeddings": False},
    ),
    "gemma3": _gemma3(8),
    "gemma3-wide-window": _gemma3(40),
    "qwen2_vl": _qwen("qwen2_vl", QWEN2, {}, {}),
    "qwen2_vl-tied": replace(_qwen("qwen2_vl", {**QWEN2, "depth": 2}, {}, {}, tie_word_embeddings=True), seed=1),
    "qwen2_5_vl": _qwen("qwen2_5_vl", QWEN25, {}, {}),
    "qwen3_5": _qwen("qwen3_5", PLAIN_QWEN3, STATES, HALF),
    "qwen3_vl": _qwen("qwen3_vl", QWEN3, INTERLEAVED, HALF),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", QWEN3, {**INTERLEAVED, **EXPERTS}, HALF),
    "qwen3_vl-flat": _qwen("qwen3_vl", {**QWEN3, "deepstack_visual_indexes": []}, INTERLEAVED, HALF),
    "mistral3": _pixtral(
        family="mistral3",
        vision={**PIXTRAL, "patch_size": 4},
        processor=PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size={"height": 4, "width": 4}),
        config={"tie_word_embeddings": False},
    ),
    "kimi_k25": Vlm(
        family="kimi_k25",
        text=KIMI_TEXT,
        vision={**TOWER, "patch_size": 4, "pos_emb_height": 6, "pos_emb_width": 6},
        processor=KIMI_PROCESSOR,
        template=templates.KIMI,
        tokens=templates.KIMI_TOKENS,
        ids={
            "image_token_id": "<|media_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|media_begin|>",
            "vision_end_token_id": "<|media_end|>",
        },
        config={"projection_hidden_size": 32, "tie_word_embeddings": False},
    ),
}
VLMS = tuple(CASES)
"""Names for `make_vlm`."""
