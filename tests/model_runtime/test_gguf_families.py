"""GGUF files of every architecture that is read: made of a checkpoint as llama.cpp's converter makes them, under the
names that the gguf package has for them, they give the logits of transformers on that checkpoint."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from model_runtime.checkpoint import load_model
from model_runtime.ops import load_ops
from model_runtime.parallel import Alone, Collectives, tensor_mesh
from model_runtime.weights.gguf_config import read_gguf_config
from model_runtime.weights.gguf_families import ARCHITECTURES
from model_runtime.weights.gguf_file import read_gguf
from model_runtime.weights.gguf_source import gguf_tensors
from model_runtime.weights.source import read, whole
from tests.family_cases import make_random_model
from tests.model_runtime.gguf_cases import CASES, ROPE, Keys
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.ranks import on_threads
from tests.model_runtime.test_alignment import random_prompts, reference_logits
from tests.model_runtime.test_gguf import metadata, permuted
from tests.model_runtime.test_gguf_file import finish

TURNED = ("llama", "granite", "smollm3")
"""Whose converters are llama's."""


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as the converter puts them together: gate and up apart, each [E, N, K]."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        before, _, after = key.partition(".experts.")
        if key.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensor = tensor.transpose(1, 2)
        if after.startswith("gate_up_proj"):
            ending = ".bias" if after.endswith("_bias") else ".weight"
            found[f"{before}.experts.gate_proj{ending}"] = tensor[:, ::2]
            found[f"{before}.experts.up_proj{ending}"] = tensor[:, 1::2]
        elif after.startswith("down_proj"):
            found[f"{before}.experts.down_proj{'.bias' if after.endswith('_bias') else '.weight'}"] = tensor
        elif after and after.startswith("0."):
            group = [tensors[f"{before}.experts.{index}.{after[2:]}"] for index in range(count(tensors, before))]
            owner = before.removeprefix("model.") if ".block_sparse_moe" in before else before  # as its publisher
            found[f"{owner.replace('block_sparse_moe', 'feed_forward')}.experts.{after[2:]}"] = torch.stack(group)
        elif not after:
            key = key.replace("correction_bias", "correction.bias")
            found[f"{key}.weight" if key.endswith("sinks") else key] = tensor
    return found


def by_head(key: str, tensor: Tensor, config: PreTrainedConfig) -> dict[str, Tensor]:
    """The matrix that makes keys and values of latents as the converter has it: a matrix a head, keys' turned."""
    if not key.endswith("kv_b_proj.weight"):
        return {key: tensor}
    heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return {key.replace("kv_b", "k_b"): keys.transpose(1, 2), key.replace("kv_b", "v_b"): values}


def count(tensors: dict[str, Tensor], layer: str) -> int:
    """Experts."""
    return len({key.split(".experts.")[1].split(".")[0] for key in tensors if key.startswith(f"{layer}.experts.")})


def convert(
    folder: Path,
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    keys: Keys,
    stacks_type: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> None:
    """In F32, but for matrices of experts and heads."""
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        model.config.num_hidden_layers,
    )
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    writer = GGUFWriter(path, architecture)
    metadata(writer, model)
    keys(writer, model)
    tensors = stacked(load_file(folder / "model.safetensors"))
    parts = [part for key, tensor in tensors.items() for part in by_head(key, tensor, model.config).items()]
    for key, tensor in parts:
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        rows, name = tensor.squeeze().numpy(), names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, f"no name for {key}"
        if architecture in TURNED and (projection := key.split(".")[-2]) in heads:
            rows = permuted(rows, heads[projection])
        rows = np.ascontiguousarray(rows)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            rows = rows + 1
        if rows.ndim == 3 and stacks_type != GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(rows, stacks_type), raw_dtype=stacks_type)
        else:
            writer.add_tensor(name, rows)
    finish(writer)


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    """A file, and the model that it was made of."""
    family, overrides, keys = CASES[request.param]
    parameters = {"rope_parameters": ROPE} | overrides
    model = make_random_model(tmp_path / "hf", family, 0, parameters)
    convert(tmp_path / "hf", tmp_path / "m.gguf", request.param.split()[0], model, keys)
    return tmp_path / "m.gguf", model


def test_every_architecture_is_tried() -> None:
    assert {name.split()[0] for name in CASES} | {"llama", "qwen2", "qwen3"} == ARCHITECTURES.keys()


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_logits_are_those_of_the_checkpoint(case: tuple[Path, PreTrainedModel]) -> None:
    path, model = case
    (prompt,) = random_prompts((30,))
    (expected,) = reference_logits(model, [prompt])
    ops = load_ops(DEVICE, "reference")

    def logits(collectives: Collectives) -> Tensor:
        loaded = load_model(path, ops, DEVICE, lambda done: None, mesh=tensor_mesh(collectives))
        return PagedRun(loaded.decoder).step({0: prompt})[0]

    assert expected.std() > 0.1
    for found in (logits(Alone()), on_threads(2, logits)[0]):
        assert (found - expected).abs().max().item() <= 1e-4


@pytest.mark.parametrize(("kind", "kept"), [("Q8_0", "q8_0"), ("Q4_0", "q4_0"), ("MXFP4", "mxfp4")])
def test_experts_of_integers_are_cut_apart_as_they_are(tmp_path: Path, kind: str, kept: str) -> None:
    family, overrides, keys = CASES["gpt-oss"]
    model, path = make_random_model(tmp_path / "hf", family, 0, overrides), tmp_path / "m.gguf"
    stored = GGMLQuantizationType[kind]
    convert(tmp_path / "hf", path, "gpt-oss", model, keys, stored)
    file = read_gguf(path)
    tensors = gguf_tensors(file, read_gguf_config(file))
    raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    for name, part in (("gate", "gate_proj"), ("down", "down_proj")):
        matrix = tensors[f"model.layers.1.mlp.experts.2.{part}.weight"]
        expected = gguf.quants.dequantize(raw[f"blk.1.ffn_{name}_exps.weight"], stored)[2]
        assert matrix.format == kept
        assert np.array_equal(read(matrix, whole(matrix.shape), torch.float32).numpy(), expected)


def test_matrices_of_latent_heads_become_floats(tmp_path: Path) -> None:
    """Attention has no integers there, and the experts beside them stay some."""
    family, overrides, keys = CASES["deepseek2 sigmoid"]
    sizes = {"qk_nope_head_dim": 32, "kv_lora_rank": 32, "moe_intermediate_size": 32}
    model, path = make_random_model(tmp_path / "hf", family, 0, overrides | sizes), tmp_path / "m.gguf"
    convert(tmp_path / "hf", path, "deepseek2", model, keys, GGMLQuantizationType.Q8_0)
    file = read_gguf(path)
    tensors = gguf_tensors(file, read_gguf_config(file))
    raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    for part in ("k", "v"):
        matrix = tensors[f"model.layers.1.self_attn.{part}_b_proj.weight"]
        expected = gguf.quants.dequantize(raw[f"blk.1.attn_{part}_b.weight"], GGMLQuantizationType.Q8_0)
        assert matrix.format is None
        assert np.array_equal(read(matrix, whole(matrix.shape)).numpy(), expected.reshape(-1, 32))
    assert tensors["model.layers.1.mlp.experts.2.up_proj.weight"].format == "q8_0"
    (prompt,) = random_prompts((20,))
    loaded = load_model(path, load_ops(DEVICE, "reference"), DEVICE, lambda done: None)
    found, (expected_TV,) = PagedRun(loaded.decoder).step({0: prompt})[0], reference_logits(model, [prompt])
    assert (found - expected_TV).abs().median() < 0.05 * expected_TV.std()  # a row may choose another expert


def test_large_gemmas_divide_scores_by_the_width_of_a_head(tmp_path: Path) -> None:
    """Of 27 billion parameters, which their number of layers tells; the others by their channels."""
    family, overrides, keys = CASES["gemma2"]
    model, path = make_random_model(tmp_path / "hf", family, 0, overrides), tmp_path / "m.gguf"

    def of_layers(count: int) -> float:
        def with_layers(writer: GGUFWriter, model: PreTrainedModel) -> None:
            keys(writer, model)
            writer.add_block_count(count)
            writer.add_key_length(8)
            writer.add_value_length(8)

        convert(tmp_path / "hf", path, "gemma2", model, with_layers)
        return read_gguf_config(read_gguf(path)).attention_scale

    assert of_layers(46) == (64 // 4) ** -0.5
    assert of_layers(42) == 8**-0.5


def test_end_of_turn_ends_outputs_of_gemma(tmp_path: Path) -> None:
    family, overrides, keys = CASES["gemma2"]
    model = make_random_model(tmp_path / "hf", family, 0, overrides)

    def with_tokens(writer: GGUFWriter, model: PreTrainedModel) -> None:
        keys(writer, model)
        writer.add_token_list(["a", "<eos>", "b", "<end_of_turn>"])

    convert(tmp_path / "hf", tmp_path / "m.gguf", "gemma2", model, with_tokens)
    assert 3 in read_gguf_config(read_gguf(tmp_path / "m.gguf")).eos_token_ids


def test_calls_end_outputs_of_gpt_oss(tmp_path: Path) -> None:
    family, overrides, keys = CASES["gpt-oss"]
    model = make_random_model(tmp_path / "hf", family, 0, overrides)

    def with_tokens(writer: GGUFWriter, model: PreTrainedModel) -> None:
        keys(writer, model)
        writer.add_token_list(["a", "<|return|>", "<|end|>", "b", "<|call|>"])

    convert(tmp_path / "hf", tmp_path / "m.gguf", "gpt-oss", model, with_tokens)
    assert read_gguf_config(read_gguf(tmp_path / "m.gguf")).eos_token_ids == (2, 1, 4)
