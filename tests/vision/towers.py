"""Tiny seeded vision-language models of transformers, saved as checkpoints and read back by the towers under test."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from model_runtime.images import TowerKernels
from model_runtime.ops import load_ops
from vision.encoder.hf_json import Json
from vision.encoder.model import ImageEncoder, ImageFeatures, ImageInput
from vision.encoder.parameters import Kernels
from vision.encoder.readers import read_vision
from vision.weights import load_vision, vision_key

PLAIN = TowerKernels(load_ops(torch.device("cpu"), "reference"))
TEXT_HIDDEN_SIZE = 24
TEXT: Mapping[str, object] = {
    "hidden_size": TEXT_HIDDEN_SIZE,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DEEPSEEK: Mapping[str, object] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
}
QWEN3: Mapping[str, object] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": TEXT_HIDDEN_SIZE,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
"""The vision_config of a small Qwen3-VL."""


def text_config(model_type: str) -> dict[str, object]:
    """The smallest language model that a vision model can be built around."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    extra = {"rope_parameters": rope} if "_vl_" in model_type else DEEPSEEK if model_type == "deepseek_v3" else {}
    return {"model_type": model_type, **TEXT, **extra}


def make_model(config: Mapping[str, object], text_type: str) -> PreTrainedModel:
    """A model of a config.json, its weights redrawn with a spread at which every flag shows in the output."""
    torch.manual_seed(0)
    values = {**config, "text_config": text_config(text_type)}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**values)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if is_scale else 0.0))
    return model


def vision_tensors(model: PreTrainedModel, folder: Path) -> tuple[Json, dict[str, Tensor]]:
    """config.json and the image tensors as the model's own checkpoint holds them, by `vision_key`."""
    model.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for key, tensor in load_file(file).items():
            if (short := vision_key(key)) is not None:
                assert short not in tensors
                tensors[short] = tensor
    return model.config.to_dict(), tensors


def make_encoder(model: PreTrainedModel, folder: Path, kernels: Kernels = PLAIN) -> ImageEncoder:
    """The encoder under test with the model's weights, every one of which it must use."""
    config, tensors = vision_tensors(model, folder)
    read = read_vision(config, TEXT_HIDDEN_SIZE)
    return ImageEncoder(read, load_vision(read, tensors), kernels)


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, relative to the largest number expected if that is above 1."""
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def flat(features: ImageFeatures) -> list[Tensor]:
    """Embeddings and deepstack levels."""
    return [features.embeddings_NO, *features.deepstack_NO]


def check_features(
    encoder: ImageEncoder, images: Sequence[ImageInput], expected: Sequence[Sequence[Tensor]]
) -> list[ImageFeatures]:
    """Within 1e-5 of the expected tensors of each image; and each image alone within 1e-6 of itself in the batch."""
    batch = encoder.encode(images)
    for image, features, references in zip(images, batch, expected, strict=True):
        alone = encoder.encode([image])[0]
        for together, single, reference in zip(flat(features), flat(alone), references, strict=True):
            assert reference.abs().max() > 0.05, "the reference is not all zero"
            assert difference(together, reference) <= 1e-5
            assert difference(single, together) <= 1e-6
    return batch
