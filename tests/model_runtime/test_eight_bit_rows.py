"""Models whose rows become 8 bits for products with integers of 8 bits (`--activation-dtype int8`): against
transformers with the numbers that the integers stand for and rows rounded in the same way, by compiled code and plain
torch; the same bits however a text is cut; on two ranks; and what is refused."""

import copy
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_runtime.align.product import load_product
from model_runtime.checkpoint import load_model
from model_runtime.config import RuntimeConfig
from model_runtime.executor import load_runner
from model_runtime.memory.budget import PlanError
from model_runtime.models.decoder import Decoder
from model_runtime.models.layer import EagerLayers
from model_runtime.ops import load_ops
from model_runtime.parallel import ONE_RANK, Mesh, tensor_mesh
from model_runtime.quantized import dequantize, quantize
from model_runtime.weights.load import Precision
from scheduler.config import SchedulerConfig
from tests.checkpoints import make_checkpoint, make_model
from tests.family_cases import make_random_model
from tests.model_runtime import deepseek
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.quantized_checkpoints import Stored, make_quantized, plain_integers
from tests.model_runtime.ranks import on_threads
from tests.model_runtime.test_checkpoint_formats import compressed, weights
from tests.model_runtime.test_quantized import stored, write_quantized

TOKENS = [(7 * place) % 256 + 3 for place in range(33)]
MADE = Precision(quantization="int8", row_bits=8)
STORED = Precision(row_bits=8)
KERNELS = ["reference", "auto"]


def load(path: Path, how: Precision, kernels: str, mesh: Mesh = ONE_RANK) -> Decoder:
    ops = load_ops(DEVICE, kernels)
    return load_model(path, ops, DEVICE, lambda done: None, precision=how, mesh=mesh).decoder


def in_float64(decoder: Decoder) -> Decoder:
    """The same but for numbers between products: those of float32, summed in another order, now and then round a number
    of a row to another integer, which these models of random weights amplify."""
    exact = copy.copy(decoder)
    exact.dtype, exact.stack = torch.float64, EagerLayers(decoder.ops, decoder.layers)
    return exact


def logits(decoder: Decoder, first: int = len(TOKENS)) -> Tensor:
    """Of the first tokens in one step and of each other in one of its own."""
    run = PagedRun(decoder, kv_type=decoder.dtype)
    parts = [TOKENS[:first], *([token] for token in TOKENS[first:])]
    return torch.cat([run.step({0: part})[0] for part in parts])


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def typically_apart(found: Tensor, expected: Tensor) -> float:
    """Of the tokens the median, which one number of a row that became another integer leaves alone."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median())


def in_eight_bits(x: Tensor) -> Tensor:
    """Rounded in float32, as rows come to a product."""
    blocks = x.float().unflatten(-1, (-1, 32))
    step = blocks.abs().amax(-1, keepdim=True) / 127
    return (torch.round(blocks * (1 / step)).to(x.dtype) * step.to(x.dtype)).flatten(-2)


def with_rounded_rows(model: PreTrainedModel, is_float: Callable[[str], bool]) -> PreTrainedModel:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not is_float(name):
            module.register_forward_pre_hook(lambda _, given: (in_eight_bits(given[0]),))
    return model


def made(folder: Path) -> tuple[Path, PreTrainedModel]:
    model = make_checkpoint(folder, "qwen3", {})
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = dequantize(quantize(parameter.data, "q8_0"))
    return folder, with_rounded_rows(model, lambda name: False)


def gguf_file(folder: Path) -> tuple[Path, PreTrainedModel]:
    model = make_model("llama", {})
    write_quantized(folder / "m.gguf", model, GGMLQuantizationType.Q8_0)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            integers = stored(parameter.detach().numpy(), GGMLQuantizationType.Q8_0)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(integers, GGMLQuantizationType.Q8_0))
    return folder / "m.gguf", with_rounded_rows(model, lambda name: False)


def compressed_tensors(folder: Path) -> tuple[Path, PreTrainedModel]:
    def is_float(name: str) -> bool:
        return name == "lm_head"

    def store(name: str, weight: Tensor) -> Stored | None:
        if is_float(name):
            return None
        tensors, _ = plain_integers(weight, 0, True)
        scale = tensors["weight_scale"].half().float()  # which blocks keep as it is
        return tensors | {"weight_scale": scale}, tensors["weight"].float() * scale

    config = compressed("int-quantized", weights(8, 0), ignore=["lm_head"])
    return folder, with_rounded_rows(make_quantized(folder, store, config, {"num_hidden_layers": 1}), is_float)


@pytest.mark.parametrize(
    ("make", "how"), [(made, MADE), (gguf_file, STORED), (compressed_tensors, STORED)], ids=["made", "gguf", "int8"]
)
@torch.inference_mode()
def test_logits_are_those_of_rounded_rows(
    tmp_path: Path, make: Callable[[Path], tuple[Path, PreTrainedModel]], how: Precision
) -> None:
    path, model = make(tmp_path)
    expected = model.double()(torch.tensor([TOKENS])).logits[0]
    plain, compiled = (load(path, how, kernels) for kernels in KERNELS)
    assert plain.parameters.row_bits == compiled.parameters.row_bits == 8
    assert apart(logits(in_float64(plain)), expected) <= 1e-3
    assert typically_apart(logits(compiled), logits(plain)) <= 1e-3
    assert apart(logits(compiled), expected) <= 1e-2
    wide = load(path, Precision(quantization=how.quantization), "auto")
    assert wide.parameters.row_bits == 16
    assert typically_apart(logits(wide), expected) > 3e-3


def make_experts(folder: Path, name: str) -> None:
    if name == "deepseek":
        deepseek.make_model({"moe_intermediate_size": 32}).save_pretrained(folder)
    else:
        make_random_model(folder, name, 0)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek"])
@torch.inference_mode()
def test_experts_and_latent_attention_in_compiled_code(tmp_path: Path, name: str) -> None:
    make_experts(tmp_path, name)
    expected, found = (load(tmp_path, MADE, kernels) for kernels in KERNELS)
    assert found.parameters.row_bits == 8
    assert apart(logits(found), logits(expected)) <= 1e-3


@torch.inference_mode()
def test_a_text_has_the_same_bits_however_it_is_cut(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {})
    model = load(tmp_path, MADE, "auto")
    whole = logits(model)
    for first in (1, 2, 17, 32):
        assert torch.equal(logits(model, first), whole), f"{first} tokens in the first step"


@pytest.mark.parametrize("kernels", KERNELS)
@torch.inference_mode()
def test_two_ranks_compute_what_one_does(tmp_path: Path, kernels: str) -> None:
    """A sum in another order may round a number of the next row to the next step: as far as that goes."""
    make_checkpoint(tmp_path, "llama", {})
    expected = logits(load(tmp_path, MADE, kernels))
    for found in on_threads(2, lambda ranks: logits(load(tmp_path, MADE, kernels, tensor_mesh(ranks))))[:1]:
        assert apart(found, expected) <= 1e-3


def run(path: Path, quantization: str = "none") -> None:
    runtime = RuntimeConfig(
        activation_dtype="int8",
        quantization=quantization,  # type: ignore[arg-type]
        kernels="reference",
        max_model_len=64,
        memory_budget=2**28,
    )
    load_runner(path, runtime, SchedulerConfig(max_num_seqs=1), lambda stage, done: None)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("none", "8-bit integers: quantization int8 makes them, .*; all matrices of this model are floats"),
        ("int4", r"model\.layers\.0\.self_attn\.q_proj\.weight is q4_0: set activation_dtype to auto"),
    ],
)
def test_other_matrices_are_refused(tmp_path: Path, quantization: str, message: str) -> None:
    make_checkpoint(tmp_path, "llama", {}, torch.bfloat16)
    with pytest.raises(PlanError, match=message):
        run(tmp_path, quantization)


def test_a_file_of_other_integers_is_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path / "m.gguf", make_model("llama", {}), GGMLQuantizationType.Q4_1)
    with pytest.raises(PlanError, match="is q4_1: set activation_dtype to auto"):
        run(tmp_path / "m.gguf")


def test_align_refuses_them_too(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {})
    runtime = RuntimeConfig(activation_dtype="int8", kernels="reference")
    with pytest.raises(PlanError, match="all matrices of this model are floats"):
        load_product(tmp_path, runtime, lambda done: None)
