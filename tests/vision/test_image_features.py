"""The embeddings that a prompt makes room for are those that transformers' tiny models give for the recipe's pixels."""

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3Model,
    Idefics3Config,
    Idefics3Model,
    InternVLConfig,
    InternVLModel,
    LlavaConfig,
    LlavaModel,
    LlavaNextConfig,
    LlavaNextModel,
    LlavaOnevisionConfig,
    LlavaOnevisionModel,
    Mistral3Config,
    Mistral3Model,
)

from tests.vision.preprocess_pictures import numbers, picture
from vision.config import read_preprocessor

WIDTH = 16
LAYERS = {"hidden_size": WIDTH, "intermediate_size": 16, "num_attention_heads": 2}
TEXT = {**LAYERS, "num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8}
TOWER = {**LAYERS, "num_hidden_layers": 2, "image_size": 56, "patch_size": 14}
CLIP = {**TOWER, "model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
LLAMA, QWEN = {**TEXT, "model_type": "llama"}, {**TEXT, "model_type": "qwen2"}
PINPOINTS = [[56 * rows, 56 * cols] for rows in range(1, 5) for cols in range(1, 5)]
SQUARE = {"size": {"height": 56, "width": 56}}
SIZES = ((2, 1), (60, 100), (100, 60), (300, 20), (20, 300), (56, 56), (57, 225), (200, 199), (133, 311), (31, 97))

MODELS = {
    "llava": (LlavaModel, LlavaConfig(vision_config=CLIP, text_config=LLAMA), {"size": 56, "crop_size": 56}),
    "llava_next": (
        LlavaNextModel,
        LlavaNextConfig(vision_config=CLIP, text_config=LLAMA, image_grid_pinpoints=PINPOINTS),
        {"size": 56, "crop_size": 56, "image_grid_pinpoints": PINPOINTS},
    ),
    "llava_onevision": (
        LlavaOnevisionModel,
        LlavaOnevisionConfig(
            vision_config=SIGLIP, text_config=QWEN, image_grid_pinpoints=PINPOINTS, vision_aspect_ratio="anyres_max_4"
        ),
        {**SQUARE, "image_grid_pinpoints": PINPOINTS},
    ),
    "internvl": (
        InternVLModel,
        InternVLConfig(vision_config={**TOWER, "image_size": [56, 56], "patch_size": [14, 14]}, text_config=QWEN),
        SQUARE,
    ),
    "mistral3": (
        Mistral3Model,
        Mistral3Config(
            vision_config={**TOWER, "model_type": "pixtral", "image_size": 112},
            text_config={**TEXT, "model_type": "mistral"},
        ),
        {"size": {"longest_edge": 112}},
    ),
    "idefics3": (
        Idefics3Model,
        Idefics3Config(vision_config=TOWER, text_config=LLAMA),
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
    ),
    "gemma3": (Gemma3Model, Gemma3Config(vision_config=TOWER, text_config=TEXT, mm_tokens_per_image=4), SQUARE),
}


@pytest.mark.parametrize("family", MODELS)
def test_room_in_the_prompt_is_what_the_tower_gives(family: str) -> None:
    kind, config, file = MODELS[family]
    model, preprocessor = kind(config).eval(), read_preprocessor(file, None, config.to_dict())
    for height, width in SIZES:
        layout = preprocessor.recipe.layout(height, width)
        room = sum(piece for piece in preprocessor.markup.pieces(layout) if isinstance(piece, int))
        if family == "mistral3" and room == 1:
            continue  # transformers 5.24 cannot split the features of a single patch
        pixels = torch.from_numpy(numbers(preprocessor.recipe, picture(height, width, 1)))
        with torch.no_grad():
            if family in ("llava_next", "llava_onevision"):
                found = model.get_image_features(pixels[None], image_sizes=torch.tensor([[height, width]]))
            elif family == "mistral3":
                found = model.get_image_features(pixels, image_sizes=torch.tensor([[layout.height, layout.width]]))
            else:
                found = model.get_image_features(pixels[None] if family == "idefics3" else pixels)
        features = found.pooler_output
        parts = features if isinstance(features, list | tuple) else [features]
        assert sum(part.numel() for part in parts) == room * WIDTH, (height, width)
