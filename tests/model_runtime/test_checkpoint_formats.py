"""Checkpoints in the formats of other tools compute what their dequantised copy computes, on one rank and on two, and
take the memory of their format."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.memory_weights import planned_weights
from model_runtime.opening import Opened, open_checkpoint, open_configuration
from model_runtime.ops import load_ops
from model_runtime.parallel import Collectives
from model_runtime.planning import outline
from model_runtime.share import split
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.load import Precision
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.quantized_checkpoints import Stored, fp8_blocks, make_quantized
from tests.model_runtime.ranks import on_threads
from tests.model_runtime.test_alignment import random_prompts, reference_logits

HOW = Precision()
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def compressed(form: str, weights: dict[str, object], **other: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    } | other


@dataclass(frozen=True)
class Case:
    """How every linear module but the output matrix is stored."""

    config: dict[str, object]
    bits: float
    """A number takes so many in memory."""

    def store(self, name: str, weight: Tensor) -> Stored | None:
        return None if name == "lm_head" else self.pack(weight)

    def pack(self, weight: Tensor) -> Stored:
        raise NotImplementedError


@dataclass(frozen=True)
class Fp8(Case):
    block: tuple[int, int] = (0, 0)
    ending: str = "weight_scale"
    static: bool = False

    def pack(self, weight: Tensor) -> Stored:
        tensors, expanded = fp8_blocks(weight, self.block, self.ending)
        if self.block == (0, 0):
            tensors[self.ending] = tensors[self.ending].view(1)
        return tensors | ({"input_scale": torch.tensor(0.01)} if self.static else {}), expanded


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
CASES: dict[str, Case] = {
    "fp8_blocks": Fp8(FP8 | {"weight_block_size": [128, 128]}, 8.25, (128, 128), "weight_scale_inv"),
    "fp8_tensor": Fp8(FP8 | {"activation_scheme": "static"}, 8.25, static=True),
    "fp8_channel": Fp8(compressed("float-quantized", FLOAT8 | {"strategy": "channel"}), 8.25, (1, 0)),
}


def load(folder: Path, collectives: Collectives | None = None, kernels: str = "auto") -> LoadedModel:
    ops = load_ops(DEVICE, kernels)
    return load_model(folder, ops, DEVICE, lambda done: None, precision=HOW, collectives=collectives)


def planned_bytes(opened: Opened) -> int:
    """Of the weights of one rank."""
    model = outline(opened)
    return planned_weights(model.groups, opened.source, split(opened.config, 1)[0], HOW, load_ops(DEVICE, "auto")).total


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_memory(tmp_path: Path, name: str) -> None:
    case, (prompt,) = CASES[name], random_prompts((23,))
    model = make_quantized(tmp_path, case.store, case.config)
    (expected,) = reference_logits(model, [prompt])

    def logits(collectives: Collectives) -> Tensor:
        return PagedRun(load(tmp_path, collectives).decoder).step({0: prompt})[0]

    loaded = load(tmp_path)
    assert difference(PagedRun(loaded.decoder).step({0: prompt})[0], expected) <= 1e-3
    assert difference(PagedRun(load(tmp_path, kernels="reference").decoder).step({0: prompt})[0], expected) <= 1e-3
    assert difference(on_threads(2, logits)[0], expected) <= 1e-3
    linear = {id(module.weight) for module in model.model.modules() if isinstance(module, torch.nn.Linear)}
    counts = [(parameter.numel(), case.bits if id(parameter) in linear else 32) for parameter in model.parameters()]
    assert loaded.weight_bytes == pytest.approx(sum(count * bits / 8 for count, bits in counts), rel=0.03)
    for opened in (open_checkpoint(tmp_path), open_configuration(tmp_path / "config.json")):
        assert planned_bytes(opened) == loaded.weight_bytes


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    make_quantized(tmp_path, CASES["fp8_channel"].store, CASES["fp8_channel"].config)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.1.mlp.down_proj.weight"
    tensors[key][3, 5] = math.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(f"in {key} (model.safetensors)")):
        load(tmp_path)
