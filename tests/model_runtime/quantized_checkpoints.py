"""Makes tiny checkpoints in the formats of other tools. What packs is written apart from what reads, slow and plain, as
the formats' papers and tools describe it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.checkpoints import make_checkpoint

SIZES: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
Stored = tuple[dict[str, Tensor], Tensor]
"""Tensors of a module by the endings of their keys, and the matrix that they stand for."""


def make_quantized(
    folder: Path,
    store: Callable[[str, Tensor], Stored | None],
    quantization_config: dict[str, object],
    overrides: dict[str, object] | None = None,
) -> PreTrainedModel:
    """A model of which `store` is given name and weight [N, K] of every linear module, and says how that is kept; None:
    as it is. What is returned has the numbers that are stored."""
    model = make_checkpoint(folder, "llama", SIZES | (overrides or {}))
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            stored = store(name, module.weight.detach())
            if stored is not None:
                del tensors[f"{name}.weight"]
                tensors |= {f"{name}.{ending}": tensor.contiguous() for ending, tensor in stored[0].items()}
                module.weight.data.copy_(stored[1])
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config}))
    return model


def fp8_blocks(weight: Tensor, block: tuple[int, int], ending: str = "weight_scale_inv") -> Stored:
    """E4M3 with a scale for each block of rows and columns."""
    numbers, expanded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    rows, columns = (size or count for size, count in zip(block, weight.shape, strict=True))
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[place].abs().max() / 448
            numbers[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            expanded[place] = numbers[place].float() * scales[i, j]
    return {"weight": numbers, ending: scales}, expanded
