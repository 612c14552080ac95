"""Tiny checkpoints of DeepSeek-V3 with a layer for multi-token prediction.

Used by the tests of that layer; `python -m tests.model_runtime.next_token FOLDER` writes one whose layer is often
right, for `server.speculation_check`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import make_tokenizer
from tests.model_runtime.deepseek import make_model

LAYERS, HIDDEN = 3, 64
PREFIX = f"model.layers.{LAYERS}."


def extra_tensors(size: int) -> dict[str, Tensor]:
    """What the checkpoint has beside an ordinary layer; the last two are copies in published files, and never read."""
    generator = torch.Generator().manual_seed(3)
    norms = {name: 1 + 0.2 * torch.randn(size, generator=generator) for name in ("enorm", "hnorm", "shared_head.norm")}
    joined = 0.2 * torch.randn(size, 2 * size, generator=generator)
    matrices = {"eh_proj": joined, "embed_tokens": torch.ones(1), "shared_head.head": torch.ones(1)}
    return {f"{name}.weight": tensor for name, tensor in (norms | matrices).items()}


def save(folder: Path, tensors: dict[str, Tensor], num_extra: int = 1) -> None:
    """A checkpoint of LAYERS layers whose next one is for multi-token prediction."""
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": num_extra}
    (folder / "config.json").write_text(json.dumps(config))


def make(folder: Path, max_positions: int = 256) -> tuple[Any, dict[str, Tensor]]:
    """A checkpoint; transformers' model of one layer more, and what its layer has beside that."""
    reference = make_model({"num_hidden_layers": LAYERS + 1, "max_position_embeddings": max_positions})
    reference.save_pretrained(folder)
    extra = extra_tensors(HIDDEN)
    save(folder, load_file(folder / "model.safetensors") | {PREFIX + key: tensor for key, tensor in extra.items()})
    return reference, extra


def agreeing(tensors: dict[str, Tensor], loudness: float) -> dict[str, Tensor]:
    """Of a checkpoint with extra tensors: blocks whose outputs are `loudness` times what they were, and a layer that
    passes on the token's embedding. The softer the blocks, the more often it predicts as the model does."""
    changed = {
        key: loudness * value for key, value in tensors.items() if key.endswith(("o_proj.weight", "down_proj.weight"))
    }
    layer = {
        "enorm.weight": torch.ones(HIDDEN),
        "eh_proj.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1),
        "shared_head.norm.weight": tensors["model.norm.weight"].clone(),
    }
    return tensors | changed | {PREFIX + key: value for key, value in layer.items()}


def main() -> None:
    """Write the checkpoint, for texts of at most 4096 tokens."""
    folder = Path(sys.argv[1])
    make(folder, 4096)
    tensors = agreeing(load_file(folder / "model.safetensors"), 0.03)
    save(folder, tensors | {"lm_head.weight": 4 * tensors["lm_head.weight"]})  # so that sampling has its favourites
    make_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main()
