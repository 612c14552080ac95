"""A language model of SmolLM2's vocabulary and architecture, a hundredth of its size, and eyes for it; and eyes of that
size, which see nothing, for the embedded model itself."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from server.embedded import embedded_path
from server.prompt.source import read_source
from vision.embedded.align import Seer
from vision.embedded.export import write_eyes, write_merged
from vision.embedded.heads import Heads
from vision.embedded.language import Language
from vision.embedded.projector import Projector
from vision.embedded.tower import Tower, TowerConfig
from vision.embedded.vocabulary import HEADS

CPU = torch.device("cpu")
SMALL = TowerConfig(width=64, layers=1, heads=8, local_layers=0)
HIDDEN = 256
"""At least as many as the heads have rows."""


def make_language() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval().to(torch.bfloat16)


def language_weights(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """As a checkpoint with tied embeddings has them."""
    return {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}


def make_seer(model: LlamaForCausalLM) -> Seer:
    torch.manual_seed(1)
    language = Language(language_weights(model), CPU)
    present = dict.fromkeys(HEADS, -1.0)
    return Seer(Tower(SMALL), Heads(64), present, language, read_source(embedded_path()).fast)


def write_random_eyes(folder: Path, weights: Mapping[str, torch.Tensor], merged: Path | None = None) -> None:
    """Eyes for the embedded model, whose weights are given, with adapters that change something; and a whole checkpoint
    with them."""
    torch.manual_seed(2)
    hidden = weights["model.embed_tokens.weight"].shape[1]
    adapters = Language(weights, CPU).adapters
    parts = Tower(SMALL), Projector(SMALL.width, hidden), adapters
    for name, parameter in adapters.named_parameters():
        if name.endswith(".b"):
            torch.nn.init.normal_(parameter, std=0.02)
    write_eyes(folder, *parts, weights)
    if merged is not None:
        write_merged(merged, *parts, weights, read_source(embedded_path()))
