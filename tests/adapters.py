"""Adapters as PEFT writes them, for the language models of the checkpoints that `tests/vlm.py` makes."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

RANK, ALPHA = 4, 6
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapter(folder: Path, model: PreTrainedModel, matrices: Sequence[str] = EVERY) -> None:
    """Draw an adapter, write its files beside the checkpoint of `model`, and merge it into that model."""
    generator, tensors = torch.Generator().manual_seed(7), {}
    for name, module in model.named_modules():
        if "language_model" not in name or name.rpartition(".")[2] not in matrices:
            continue
        assert isinstance(module, torch.nn.Linear)
        down = 0.2 * torch.randn(RANK, module.in_features, generator=generator)
        up = 0.2 * torch.randn(module.out_features, RANK, generator=generator)
        tensors |= {f"base_model.model.{name}.lora_{letter}.weight": x for letter, x in (("A", down), ("B", up))}
        with torch.no_grad():
            module.weight += up @ down * (ALPHA / RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": list(matrices)}))
