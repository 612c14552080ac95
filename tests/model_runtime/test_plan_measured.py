"""What is planned is what a process takes, as Linux counts its pages: weights, keys and values, and the peak of the
largest step, of SmolLM2, a mixture of experts, a model with latent attention, and one that sees."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from server.embedded import embedded_path
from tests.checkpoints import VOCAB_SIZE
from tests.vlm import make_vlm

SHAPE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
MIXTURE = SHAPE | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "num_key_value_heads": 8}
LATENT = SHAPE | {
    "head_dim": None,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
}
TOKENS, SEQUENCES = 128, 4
COUNTED_APART = 2 * 4096 * max(32, 2 * (os.cpu_count() or 1))
"""Bytes that a small step's peak may be off: Linux adds up pages in batches, one for each processor, and a process is
on two in the meantime. On two processors steps of 2 to 4 MiB were 12 to 192 KiB below what is planned."""


def make_text(folder: Path, family: str, shape: dict[str, object]) -> None:
    """All tokens get the same experts, since the router does not tell them apart: what memory is planned for."""
    config = CONFIG_MAPPING[family](**{key: value for key, value in shape.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.zero_()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("models")
    make_text(folder / "mixture", "qwen3_moe", MIXTURE)
    make_text(folder / "latent", "deepseek_v3", LATENT)
    make_vlm(folder / "images", "llava-clip", {key: SHAPE[key] for key in SHAPE if key != "vocab_size"})
    side = json.loads((folder / "images" / "config.json").read_text())["vision_config"]["image_size"]
    paths = {"smollm2": embedded_path(), **{name: folder / name for name in ("mixture", "latent", "images")}}
    asked = [
        {"path": str(path), "tokens": TOKENS, "sequences": SEQUENCES, "side": side if name == "images" else 0}
        for name, path in paths.items()
    ]
    command = (sys.executable, "-m", "tests.model_runtime.measured_memory", json.dumps(asked))
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True, env=environment)
    return dict(zip(paths, map(json.loads, result.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", ["smollm2", "mixture", "latent", "images"])
def test_a_process_takes_what_is_planned(measured: dict[str, dict[str, int]], name: str) -> None:
    found = measured[name]
    planned, taken = (sum(found[part + ending] for part in ("weights", "kv", "step")) for ending in ("", " taken"))
    assert taken == pytest.approx(planned, rel=0.03), found
    # tables, pages that end behind a matrix, and what Python keeps of the model
    assert found["weights"] < found["weights taken"] < found["weights"] + 6 * 2**20, found
    assert found["kv taken"] == pytest.approx(found["kv"], rel=0.03), found
    assert found["tensors of the step"] == pytest.approx(found["step"], rel=0.1), found
    # of what a step has, pages that it never touches take nothing
    assert 0.85 * found["step"] - COUNTED_APART < found["step taken"] < 1.05 * found["step"] + COUNTED_APART, found
