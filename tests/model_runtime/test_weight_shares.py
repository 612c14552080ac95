"""Weights that are saved, loaded by two or three ranks, and put together again are the same bit for bit."""

import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.hf.config import read_hf_config
from model_runtime.hf.quantization import read_quantization
from model_runtime.models.decoder import TIED_HEAD_KEY, decoder_table
from model_runtime.ops.matrices import expanded
from model_runtime.ops.registry import select
from model_runtime.share import Share, split
from model_runtime.weights.gguf_config import read_gguf_config
from model_runtime.weights.gguf_file import read_gguf
from model_runtime.weights.gguf_source import gguf_tensors
from model_runtime.weights.json_file import read_json
from model_runtime.weights.load import EXACT, Precision, load_parameters
from model_runtime.weights.matrices import matrices_of
from model_runtime.weights.safetensors_source import FileTensor, read_safetensors
from model_runtime.weights.source import Index, TensorSource
from model_runtime.weights.spelling import plain_source
from model_runtime.weights.table import Parameter, Parameters
from tests.checkpoints import make_checkpoint, make_model
from tests.model_runtime import deepseek
from tests.model_runtime.paged import DEVICE
from tests.model_runtime.quantized_checkpoints import Stored, gptq, make_quantized
from tests.model_runtime.test_gguf import write_model
from tests.model_runtime.test_quantized import STORED, write_quantized

BIASES = {"attention_bias": True, "mlp_bias": True}
INTEGERS = Precision(row_bits=16)


def folder(path: Path) -> tuple[ModelConfig, TensorSource]:
    config = read_hf_config(read_json(path / "config.json"), None)
    return config, plain_source(read_safetensors(path), config)


def file(path: Path) -> tuple[ModelConfig, TensorSource]:
    opened = read_gguf(path)
    config = read_gguf_config(opened)
    return config, gguf_tensors(opened, config)


def load(config: ModelConfig, source: TensorSource, share: Share, precision: Precision) -> Parameters:
    def ignorable(key: str) -> bool:
        return key == TIED_HEAD_KEY and config.tie_word_embeddings

    table = decoder_table(config)
    return load_parameters(table, source, select("any"), DEVICE, ignorable, lambda count: None, share, precision)


def numbers(parameters: Parameters, name: str) -> Tensor | None:
    """Of a matrix or vector; None where this rank has none."""
    if name in parameters.matrices:
        return expanded(parameters.matrices[name], parameters.matrices[name].data)
    return parameters.vectors.get(name)


@dataclass
class Assembled:
    """A parameter whose parts come from ranks."""

    whole: Tensor
    times: Tensor
    """How often a number came."""

    def add(self, part: Tensor, index: Index) -> None:
        """A part must be what the whole has there."""
        assert torch.equal(part, self.whole[index])
        self.times[index] += 1


def assert_reassembled(
    parameter: Parameter, whole: Parameters, shares: tuple[Share, ...], ranks: list[Parameters]
) -> None:
    expected = numbers(whole, parameter.name)
    assert expected is not None
    slots = expected.split([slot.rows for slot in parameter.slots])
    assembled = [Assembled(rows, torch.zeros_like(rows)) for rows in slots]
    for share, parameters in zip(shares, ranks, strict=True):
        found = numbers(parameters, parameter.name)
        assert (found is not None) == parameter.belongs_to(share)
        if found is None:
            continue
        indices = [parameter.index(slot, share) for slot in parameter.slots]
        parts = found.split([index[0].stop - index[0].start for index in indices])
        for slot, part, index in zip(assembled, parts, indices, strict=True):
            slot.add(part, index)
    for slot, declared in zip(assembled, parameter.slots, strict=True):
        is_cut = parameter.columns_split is not None or declared.split not in (None, "kv_heads")
        once = is_cut or parameter.only_first or parameter.expert is not None
        assert slot.times.min() >= 1 and (slot.times.max() == 1 or not once), f"{declared.key} is not divided"


def assert_shares(
    config: ModelConfig, source: TensorSource, size: int, precision: Precision = EXACT, *, whole_experts: bool = False
) -> list[Parameters]:
    (all_of_it,) = split(config, 1)
    whole, shares = load(config, source, all_of_it, precision), split(config, size, whole_experts=whole_experts)
    ranks = [load(config, source, share, precision) for share in shares]
    for parameter in decoder_table(config):
        assert_reassembled(parameter, whole, shares, ranks)
    assert sum(rank.num_bytes for rank in ranks) < 1.5 * whole.num_bytes
    return ranks


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}),
        ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1} | BIASES),
        ("qwen3", {"attention_bias": True}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    ],
)
def test_floats(tmp_path: Path, family: str, overrides: dict[str, object], size: int) -> None:
    make_checkpoint(tmp_path, family, overrides, torch.bfloat16)
    assert_shares(*folder(tmp_path), size)


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("overrides", [{}, {"q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": True}])
def test_latent_attention_and_experts(
    tmp_path: Path, overrides: dict[str, object], size: int, whole_experts: bool
) -> None:
    deepseek.make_model(overrides).save_pretrained(tmp_path)
    ranks = assert_shares(*folder(tmp_path), size, whole_experts=whole_experts)
    experts = [sum(".experts." in name for name in rank.matrices) for rank in ranks]
    assert experts == [2 * 2 * 12 // (size if whole_experts else 1)] * size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("quantized", STORED)
def test_integers(tmp_path: Path, quantized: str, size: int) -> None:
    """Blocks of 32 columns stay integers; a rank whose heads are not whole blocks has them expanded."""
    for head_dim in (16, 32):  # whole groups, and a group that is cut
        shape = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": head_dim}
        write_quantized(tmp_path / "m.gguf", make_model("llama", shape), STORED[quantized])
        config, source = file(tmp_path / "m.gguf")
        ranks = assert_shares(config, source, size, INTEGERS)
        for rank in ranks:
            assert {name for name, matrix in rank.matrices.items() if matrix.quantized != quantized} == set()


GROUPS: dict[str, object] = {
    "hidden_size": 192,
    "intermediate_size": 416,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 32,
}
"""The output matrix of attention has 384 columns, three groups of 128, and the last of a layer 416: one more of 32."""


CUT_BY_COLUMNS = ("attention.output", "mlp.down")


def assert_groups(ranks: list[Parameters], wide: str, of_blocks: str) -> None:
    """Of the matrices of a layer whose columns are divided; all others keep their groups."""
    kinds = [rank.matrices[f"layers.1.{name}.weight"].quantized for name in CUT_BY_COLUMNS for rank in ranks]
    if len(ranks) == 2:  # from column 192 and 224 on
        assert kinds == [wide, of_blocks, wide, of_blocks]
    else:  # from 128, 256; 160, 288
        assert kinds == [wide, wide, wide, wide, of_blocks, of_blocks]
    for rank in ranks:
        assert rank.matrices["layers.1.attention.qkv.weight"].quantized == wide
        assert rank.matrices["layers.1.mlp.gate_up.weight"].quantized == wide


@pytest.mark.parametrize("size", [2, 3])
def test_groups_of_128_made_while_loading(tmp_path: Path, size: int) -> None:
    """A rank whose columns begin inside a group has the numbers of the whole: the scale of that group in each block."""
    make_checkpoint(tmp_path, "llama", GROUPS)
    ranks = assert_shares(*folder(tmp_path), size, Precision(quantization="int4-g128"))
    assert_groups(ranks, "q4_0_128", "q4_0")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_128_of_a_file(tmp_path: Path, symmetric: bool, size: int) -> None:
    how = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": symmetric}

    def store(name: str, weight: Tensor) -> Stored | None:
        return None if name == "lm_head" else gptq(weight, 4, 128, symmetric, 1)

    make_quantized(tmp_path, store, how, GROUPS)
    config_json = read_json(tmp_path / "config.json")
    config = read_hf_config(config_json, None)
    source = plain_source(matrices_of(read_safetensors(tmp_path), read_quantization(config_json)), config)
    ranks = assert_shares(config, source, size, INTEGERS)
    assert_groups(ranks, *(("q4_0_128", "q4_0") if symmetric else ("q4_z_128", "q4_z")))


def test_columns_that_are_not_blocks_are_expanded(tmp_path: Path) -> None:
    write_quantized(tmp_path / "m.gguf", make_model("llama", {"num_key_value_heads": 4}), STORED["q4_1"])
    config, source = file(tmp_path / "m.gguf")
    ranks = assert_shares(config, source, 3, INTEGERS)
    assert ranks[0].matrices["layers.0.attention.output.weight"].quantized == "q4_1"
    assert ranks[1].matrices["layers.0.attention.output.weight"].quantized is None
    assert ranks[1].matrices["layers.0.attention.qkv.weight"].quantized == "q4_1"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_floats_of_a_gguf_file(tmp_path: Path, family: str) -> None:
    """Heads whose rows the file has in another order, and biases."""
    write_model(tmp_path / "m.gguf", family, make_model(family, {}))
    assert_shares(*file(tmp_path / "m.gguf"), 2)


def test_what_is_read_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank asks for its rows and columns alone."""
    make_checkpoint(tmp_path, "llama", {})
    config, source = folder(tmp_path)
    read: dict[str, Index] = {}
    read_into, names = FileTensor.read_into, {id(tensor): key for key, tensor in source.items()}

    def remembered(self: FileTensor, index: Index, target: Tensor) -> None:
        assert names[id(self)] not in read, f"{names[id(self)]} is read twice"
        read[names[id(self)]] = index
        read_into(self, index, target)

    monkeypatch.setattr(FileTensor, "read_into", remembered)
    load(config, source, split(config, 2)[1], EXACT)
    layer = "model.layers.2"
    assert read.keys() == source.keys()
    assert read[f"{layer}.self_attn.q_proj.weight"] == (slice(32, 64), slice(0, 64))
    assert read[f"{layer}.self_attn.v_proj.weight"] == (slice(16, 32), slice(0, 64))
    assert read[f"{layer}.self_attn.o_proj.weight"] == (slice(0, 64), slice(32, 64))
    assert read[f"{layer}.mlp.up_proj.weight"] == (slice(64, 96), slice(0, 64))
    assert read[f"{layer}.mlp.down_proj.weight"] == (slice(0, 64), slice(64, 96))
    assert read["lm_head.weight"] == read["model.embed_tokens.weight"] == (slice(144, 259), slice(0, 64))
    assert read["model.norm.weight"] == (slice(0, 64),)


def test_of_a_file_with_columns_first_one_matrix_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two ranks needs half of the rows of most, and does not come to the end of them."""
    how = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    make_quantized(tmp_path, lambda name, weight: None if name == "lm_head" else gptq(weight, 4, 32, True, 1), how)
    stored, config_json = read_safetensors(tmp_path), read_json(tmp_path / "config.json")
    config = read_hf_config(config_json, None)
    source = plain_source(matrices_of(stored, read_quantization(config_json)), config)
    numbers = {id(tensor): key for key, tensor in stored.items() if key.endswith(".qweight")}
    times: Counter[str] = Counter()
    kept: list[weakref.ref[Tensor]] = []
    read_into = FileTensor.read_into

    def remembered(self: FileTensor, index: Index, target: Tensor) -> None:
        read_into(self, index, target)
        if id(self) in numbers:
            times[numbers[id(self)]] += 1
            kept.append(weakref.ref(target))

    monkeypatch.setattr(FileTensor, "read_into", remembered)
    load(config, source, split(config, 2)[0], INTEGERS)
    assert times == dict.fromkeys(numbers.values(), 1) and len(kept) == 2 * 7
    assert [target() is not None for target in kept] == [False] * 13 + [True]
