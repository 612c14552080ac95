"""A whole Llama 4: its language model under the keys of the composite, its tower left out."""

from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from model_runtime.checkpoint import load_model
from model_runtime.ops import load_ops
from tests.family_cases import random_config
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.test_alignment import random_prompts, reference_logits

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
PROJECTOR = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}


def test_language_model_of_a_composite(tmp_path: Path) -> None:
    text = CONFIG_MAPPING["llama4_text"](**random_config("llama4_text", 0)).to_dict()
    vision = {**TOWER, **PROJECTOR, "image_size": 28, "patch_size": 14}
    config = CONFIG_MAPPING["llama4"](text_config=text, vision_config=vision, image_token_index=5)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.12, generator=generator)
    model.save_pretrained(tmp_path)
    (prompt,) = random_prompts((30,))
    (expected,) = reference_logits(model.language_model, [prompt])
    loaded = load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda done: None)
    assert loaded.vision is None
    found = PagedRun(loaded.decoder).step({0: prompt})[0]
    assert expected.std() > 0.1 and (found - expected).abs().max().item() <= 1e-4
