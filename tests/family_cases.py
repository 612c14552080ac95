"""Tiny random models of many families of text models, in transformers' classes: which families there are, and what is
drawn for a file of each. Used by the tests of the runtime."""

import random
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests import family_draws as draws
from tests.checkpoints import SMALL
from tests.family_draws import Draw, Overrides

DRAWS: dict[str, tuple[Draw, ...]] = {
    "cohere": (draws.plain, draws.cohere),
    "cohere2": (draws.plain, draws.layer_types, draws.cohere),
    "deepseek_v2": (draws.plain, draws.experts("n_routed_experts"), draws.deepseek_v2),
    "exaone4": (draws.plain, draws.exaone4),
    "gemma2": (draws.plain, draws.gemma2),
    "glm": (draws.plain, draws.glm),
    "glm4": (draws.plain, draws.glm),
    "glm4_moe": (draws.plain, draws.experts("n_routed_experts"), draws.glm4_moe),
    "gpt_oss": (draws.plain, draws.experts("num_local_experts"), draws.gpt_oss),
    "granite": (draws.plain, draws.granite),
    "kimi_linear": (draws.plain, draws.experts("num_local_experts"), draws.kimi_linear),
    "llama4_text": (draws.plain, draws.experts("num_local_experts"), draws.llama4),
    "mimo_v2_flash": (draws.plain, draws.experts("n_routed_experts"), draws.mimo),
    "minimax_m2": (draws.plain, draws.experts("num_local_experts"), draws.minimax_m2),
    "ministral": (draws.plain, draws.layer_types),
    "ministral3": (draws.plain, draws.ministral3),
    "mixtral": (draws.plain, draws.experts("num_local_experts"), draws.mixtral),
    "olmo2": (draws.plain, draws.olmo2),
    "olmo3": (draws.plain, draws.olmo3),
    "olmoe": (draws.plain, draws.experts("num_experts"), draws.olmoe),
    "phi3": (draws.plain, draws.phi3),
    "qwen2_moe": (draws.plain, draws.experts("num_experts"), draws.qwen2_moe),
    "qwen3_5_moe_text": (draws.plain, draws.experts("num_experts"), draws.qwen2_moe, draws.qwen3_5),
    "qwen3_5_text": (draws.plain, draws.qwen3_5),
    "qwen3_moe": (draws.plain, draws.experts("num_experts"), draws.qwen3_moe),
    "qwen3_next": (draws.plain, draws.experts("num_experts"), draws.qwen3_next),
    "seed_oss": (draws.plain, lambda draw: {"attention_out_bias": draw.choice((False, True))} | draws.biases(draw)),
    "smollm3": (draws.plain, draws.smollm3),
}
"""By model_type; what comes later wins."""
OUTSIDE: dict[str, tuple[Draw, ...]] = {
    "arcee": (draws.plain, draws.biases),
    "deepseek_v3": (draws.plain, draws.experts("n_routed_experts")),
    "gemma3_text": (draws.plain,),
}
"""The same of families that are in packages, or whose random models have tests of their own."""


def random_config(family: str, seed: int) -> Overrides:
    """Keys of transformers' configuration class."""
    draw, config = random.Random(f"{family} {seed}"), dict(SMALL)
    for part in {**DRAWS, **OUTSIDE}[family]:
        config |= part(draw)
    if config["head_dim"] is None:
        del config["head_dim"]
    return config


def make_random_model(folder: Path, family: str, seed: int, overrides: Overrides | None = None) -> PreTrainedModel:
    """Writes a float32 checkpoint whose weights are wide enough that logits differ clearly."""
    drawn = random_config(family, seed) | (overrides or {})
    # the other implementations of attention leave caps out
    config = CONFIG_MAPPING[family](**drawn, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
        for name, tensor in [*model.named_parameters(), *biases]:
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.12, generator=generator)
    model.save_pretrained(folder)
    return model
