"""Checkpoints in the formats of other tools compute what their dequantised copy computes, on one rank and on two, and
take the memory of their format."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.memory.planning import Outline
from model_runtime.opening import Opened, open_checkpoint, open_configuration
from model_runtime.ops import load_ops
from model_runtime.parallel import ONE_RANK, Collectives, Mesh, tensor_mesh
from model_runtime.share import split
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.load import Precision
from tests.model_runtime import deepseek
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.quantized_checkpoints import (
    Stored,
    awq,
    fp8_blocks,
    gptq,
    make_quantized,
    mxfp4,
    packed,
    plain_integers,
)
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
    pack: Callable[[Tensor], Stored]
    sizes: dict[str, object] | None = None
    """Of the model, if not the usual ones."""

    def store(self, name: str, weight: Tensor) -> Stored | None:
        return None if name == "lm_head" else self.pack(weight)


def fp8_tensor(weight: Tensor) -> Stored:
    """One scale, and one of activations, which are not rounded here."""
    tensors, expanded = fp8_blocks(weight, (0, 0), "weight_scale")
    return tensors | {"weight_scale": tensors["weight_scale"].view(1), "input_scale": torch.tensor(0.01)}, expanded


def gptq_any_order(weight: Tensor) -> Stored:
    """Columns are grouped by how large they are."""
    return gptq(weight, 4, 128, True, 1, order=weight.abs().sum(0).argsort(descending=True))


def weights(bits: int, group: int, *, symmetric: bool = True) -> dict[str, object]:
    found = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, "group_size": group or None}
    return found | {"strategy": "group" if group else "channel", "actorder": None, "observer": "minmax"}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.1}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
SHORT: dict[str, object] = {"intermediate_size": 416}
"""Three groups of 128 and one of 32, which two ranks cut inside a group."""
CASES: dict[str, Case] = {
    "fp8_blocks": Case(FP8 | {"weight_block_size": [128, 128]}, 8.25, lambda w: fp8_blocks(w, (128, 128))),
    "fp8_tensor": Case(FP8 | {"activation_scheme": "static"}, 8.25, fp8_tensor),
    "fp8_channel": Case(
        compressed("float-quantized", FLOAT8 | {"strategy": "channel"}),
        8.25,
        lambda w: fp8_blocks(w, (1, 0), "weight_scale"),
    ),
    "packed_4": Case(compressed("pack-quantized", weights(4, 128)), 4.125, lambda w: packed(w, 4, 128, True)),
    "packed_4_short": Case(
        compressed("pack-quantized", weights(4, 128)), 4.13, lambda w: packed(w, 4, 128, True), SHORT
    ),
    "packed_4_64": Case(compressed("pack-quantized", weights(4, 64)), 4.5, lambda w: packed(w, 4, 64, True)),
    "packed_4_rows": Case(compressed("pack-quantized", weights(4, 0)), 4.125, lambda w: packed(w, 4, 0, True)),
    "packed_4_zeros": Case(
        compressed("pack-quantized", weights(4, 32, symmetric=False)), 5.0, lambda w: packed(w, 4, 32, False)
    ),
    "packed_4_zeros_128": Case(
        compressed("pack-quantized", weights(4, 128, symmetric=False)), 4.25, lambda w: packed(w, 4, 128, False)
    ),
    "packed_8": Case(compressed("pack-quantized", weights(8, 0)), 8.5, lambda w: packed(w, 8, 0, True)),
    "int_8": Case(compressed("int-quantized", weights(8, 0)), 8.5, lambda w: plain_integers(w, 0, True)),
    "int_8_zeros": Case(
        compressed("naive-quantized", weights(8, 64, symmetric=False)), 16, lambda w: plain_integers(w, 64, False)
    ),
    "mxfp4": Case(compressed("mxfp4-pack-quantized", FLOAT4), 4.25, mxfp4),
    "awq": Case(AWQ, 4.25, lambda w: awq(w, 128)),
    "awq_32": Case(AWQ | {"group_size": 32}, 5.0, lambda w: awq(w, 32)),
    "gptq": Case(GPTQ, 4.125, lambda w: gptq(w, 4, 128, True, 1)),
    "gptq_zeros": Case(GPTQ | {"sym": False, "group_size": 32}, 5.0, lambda w: gptq(w, 4, 32, False, 1)),
    "gptq_second": Case(
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, 4.25, lambda w: gptq(w, 4, 128, False, 2)
    ),
    "gptq_short": Case(GPTQ | {"sym": False}, 4.26, lambda w: gptq(w, 4, 128, False, 1), SHORT),
    "gptq_8": Case(GPTQ | {"bits": 8, "group_size": -1}, 8.5, lambda w: gptq(w, 8, 0, True, 1)),
    "gptq_any_order": Case(GPTQ | {"desc_act": True}, 16, gptq_any_order),
}


def load(folder: Path, mesh: Mesh = ONE_RANK, kernels: str = "auto", *, whole_experts: bool = False) -> LoadedModel:
    return load_model(
        folder,
        load_ops(DEVICE, kernels),
        DEVICE,
        lambda done: None,
        precision=HOW,
        mesh=mesh,
        whole_experts=whole_experts,
    )


def planned_bytes(opened: Opened) -> int:
    """Of the weights of one rank."""
    return Outline(opened).weights(split(opened.config, 1)[0], HOW, load_ops(DEVICE, "auto")).total


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_memory(tmp_path: Path, name: str) -> None:
    case, (prompt,) = CASES[name], random_prompts((23,))
    model = make_quantized(tmp_path, case.store, case.config, case.sizes)
    (expected,) = reference_logits(model, [prompt])

    def logits(collectives: Collectives) -> Tensor:
        return PagedRun(load(tmp_path, tensor_mesh(collectives)).decoder).step({0: prompt})[0]

    loaded = load(tmp_path)
    assert difference(PagedRun(loaded.decoder).step({0: prompt})[0], expected) <= 1e-3
    assert difference(PagedRun(load(tmp_path, kernels="reference").decoder).step({0: prompt})[0], expected) <= 1e-3
    assert difference(on_threads(2, logits)[0], expected) <= 1e-3
    linear = {id(module.weight) for module in model.model.modules() if isinstance(module, torch.nn.Linear)}
    counts = [(parameter.numel(), case.bits if id(parameter) in linear else 32) for parameter in model.parameters()]
    assert loaded.weight_bytes == pytest.approx(sum(count * bits / 8 for count, bits in counts), rel=0.03)
    for opened in (open_checkpoint(tmp_path), open_configuration(tmp_path / "config.json")):
        assert planned_bytes(opened) == loaded.weight_bytes


def test_groups_of_several_lengths_in_what_is_multiplied_as_one(tmp_path: Path) -> None:
    """Queries in groups of 128, keys and values in groups of 32: all become blocks of 32, and lose nothing."""
    (prompt,) = random_prompts((23,))
    how = compressed("pack-quantized", {})
    usual = {"targets": ["Linear"], "weights": weights(4, 32)}
    how["config_groups"] = {"group_0": {"targets": ["re:.*q_proj"], "weights": weights(4, 128)}, "group_1": usual}
    case = Case(how, 4.5, lambda w: packed(w, 4, 32, True))

    def store(name: str, weight: Tensor) -> Stored | None:
        return packed(weight, 4, 128, True) if name.endswith("q_proj") else case.store(name, weight)

    (expected,) = reference_logits(make_quantized(tmp_path, store, how), [prompt])
    loaded = load(tmp_path)
    assert loaded.decoder.layers[0].attention.qkv.weight.quantized == "q4_0"
    assert difference(PagedRun(loaded.decoder).step({0: prompt})[0], expected) <= 1e-3
    assert planned_bytes(open_configuration(tmp_path / "config.json")) == loaded.weight_bytes


def test_experts_alone_may_be_quantised(tmp_path: Path) -> None:
    """As Kimi's are; on two ranks too, which have columns of all of them or some wholly."""
    (prompt,), floats, small = random_prompts((23,)), tmp_path / "floats", tmp_path / "small"
    for folder in (floats, small):
        deepseek.make_model({"moe_intermediate_size": 64}).save_pretrained(folder)
    tensors = load_file(floats / "model.safetensors")
    quantised = dict(tensors)
    for key in [key for key in tensors if ".experts." in key]:
        stored, tensors[key] = mxfp4(quantised.pop(key))
        quantised |= {f"{key.removesuffix('weight')}{ending}": tensor for ending, tensor in stored.items()}
    save_file(tensors, floats / "model.safetensors")
    save_file(quantised, small / "model.safetensors")
    config = json.loads((small / "config.json").read_text())
    how = compressed("mxfp4-pack-quantized", FLOAT4)
    how["config_groups"] = {"group_0": {"targets": ["re:.*\\.experts\\.\\d+\\."], "weights": FLOAT4}}
    (small / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    expected = PagedRun(load(floats).decoder).step({0: prompt})[0]
    loaded = load(small)
    assert loaded.decoder.layers[1].mlp.experts[3].down.weight.quantized == "mxfp4"
    assert difference(PagedRun(loaded.decoder).step({0: prompt})[0], expected) <= 1e-3
    assert planned_bytes(open_checkpoint(small)) == planned_bytes(open_configuration(small / "config.json"))
    for whole_experts in (False, True):

        def logits(collectives: Collectives, whole: bool = whole_experts) -> Tensor:
            return PagedRun(load(small, tensor_mesh(collectives), whole_experts=whole).decoder).step({0: prompt})[0]

        assert difference(on_threads(2, logits)[0], expected) <= 1e-3


def changed(folder: Path, change: dict[str, Tensor | None]) -> None:
    tensors: dict[str, Tensor | None] = {**load_file(folder / "model.safetensors"), **change}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


MODULE = "model.layers.1.mlp.down_proj"


REFUSED: dict[str, list[tuple[str, Tensor | None, str]]] = {
    "packed_4": [
        ("weight_scale", None, f"missing is {MODULE}.weight_scale"),
        ("weight_scale", torch.ones(256, 2), "has shape [256, 2]; the blocks make it [256, 3]"),
        ("weight_scale", torch.full((256, 3), 1e6), "has numbers beyond those of float16"),
        ("weight_scale", torch.full((256, 3), math.nan), f"in {MODULE}.weight_scale (model"),
        ("weight_shape", torch.zeros(0, dtype=torch.int64), "weight_shape is torch.int64 [0], and not the shape of a"),
        ("weight_shape", torch.tensor([math.nan, 384]), "weight_shape is torch.float32 [2], and not the shape of a"),
        ("weight_shape", torch.tensor([256, -384]), "the format needs int32 [256, -48]"),
    ],
    "packed_4_zeros": [("weight_zero_point", None, f"missing is {MODULE}.weight_zero_point")],
    "mxfp4": [
        ("weight_scale", None, "has no weight_scale [256, 12] of exponents beside it"),
        ("weight_scale", torch.full((256, 12), 255, dtype=torch.uint8), f"in {MODULE}.weight (mo"),
    ],
    "gptq": [
        ("qzeros", torch.zeros(3, 32, dtype=torch.int32), "has zero points; quantization_config"),
        ("qzeros", torch.zeros(3, 31, dtype=torch.int32), "the format needs int32 [3, 32]"),
        ("qweight", torch.zeros(48, dtype=torch.int32), f"{MODULE}.qweight has shape [48], which is no matrix"),
        ("g_idx", torch.zeros(384, dtype=torch.int32), "its columns are not in groups of 128"),
    ],
    "fp8_blocks": [
        ("weight_scale_inv", None, f"{MODULE}.weight is no matrix with one of"),
        ("weight", torch.zeros(256, 384, dtype=torch.int8), "config.json says fp8 of it"),
    ],
}
"""Tensors of a module that are others, or lost, and what is said of them."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named(tmp_path: Path, name: str) -> None:
    make_quantized(tmp_path, CASES[name].store, CASES[name].config)
    whole = load_file(tmp_path / "model.safetensors")
    for ending, other, words in REFUSED[name]:
        save_file(whole, tmp_path / "model.safetensors")
        changed(tmp_path, {f"{MODULE}.{ending}": other})
        with pytest.raises(CheckpointError, match=re.escape(words)):
            load(tmp_path)


def test_a_module_that_is_ignored_must_hold_floats(tmp_path: Path) -> None:
    case = CASES["packed_4"]
    make_quantized(tmp_path, case.store, case.config | {"ignore": ["lm_head", MODULE]})
    with pytest.raises(
        CheckpointError, match=r"down_proj\.weight_packed is stored as int32; config\.json says floats of it"
    ):
        load(tmp_path)


def test_scales_of_a_cache_are_not_needed(tmp_path: Path) -> None:
    make_quantized(tmp_path, CASES["fp8_tensor"].store, CASES["fp8_tensor"].config)
    changed(tmp_path, {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)})
    assert load(tmp_path).config.num_layers == 2


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    make_quantized(tmp_path, CASES["fp8_channel"].store, CASES["fp8_channel"].config)
    numbers = load_file(tmp_path / "model.safetensors")[f"{MODULE}.weight"]
    numbers[3, 5] = math.nan
    changed(tmp_path, {f"{MODULE}.weight": numbers})
    with pytest.raises(CheckpointError, match=re.escape(f"in {MODULE}.weight (model.safetensors)")):
        load(tmp_path)
