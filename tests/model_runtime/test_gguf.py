"""GGUF models: equal to the checkpoint they were made from, expanded bit for bit, configs read or refused."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel

from model_runtime.architecture import RopeConfig
from model_runtime.blocks.rope import inverse_frequencies
from model_runtime.checkpoint import load_model
from model_runtime.models.decoder import decoder_table
from model_runtime.ops import load_ops
from model_runtime.weights.dequantize import dequantize, plain_dtype
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_config import read_gguf_config
from model_runtime.weights.gguf_file import GGML_TYPES, GgufFile, read_gguf
from model_runtime.weights.gguf_source import gguf_tensors, hf_key
from model_runtime.weights.load import check_keys
from tests.checkpoints import make_model
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.test_gguf_file import finish

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(key: str) -> str:
    stem, _, ending = key.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{ending}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{ending}"


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter stores query and key rows of llama models."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def metadata(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", 1.0))
    parameters = config.rope_parameters
    writer.add_rope_freq_base(parameters.get("full_attention", parameters)["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(1)


def write_model(
    path: Path, family: str, model: PreTrainedModel, extra: Callable[[GGUFWriter], None] = lambda writer: None
) -> None:
    """What llama.cpp's converter would make of a model, in F32."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    writer = GGUFWriter(path, family)
    metadata(writer, model)
    extra(writer)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        rows, projection = tensor.numpy(), key.split(".")[-2]
        if family == "llama" and projection in heads:
            rows = permuted(rows, heads[projection])
        writer.add_tensor(gguf_name(key), np.ascontiguousarray(rows))
    finish(writer)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_model_from_gguf_equals_transformers(tmp_path: Path, family: str, overrides: dict[str, object]) -> None:
    model = make_model(family, overrides)
    write_model(tmp_path / "m.gguf", family, model)
    loaded = load_model(tmp_path / "m.gguf", load_ops(DEVICE, "reference"), DEVICE, lambda fraction: None)
    assert loaded.config.family == family
    assert loaded.config.eos_token_ids == (2, 1)
    assert loaded.config.rms_norm_eps == 1e-5
    prompt = list(range(3, 36))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    logits = PagedRun(loaded.decoder).step({0: prompt})[0]
    assert (logits - expected).abs().max().item() <= 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_llama3_scaling_comes_as_divisors(tmp_path: Path) -> None:
    """llama.cpp's converter stores llama3 rope scaling as a tensor; it must give the frequencies of the formula."""
    formula = RopeConfig(theta=10000.0, rotary_dim=16, kind="llama3", factor=8.0, original_max_position=32)
    plain = RopeConfig(theta=10000.0, rotary_dim=16)
    divisors = inverse_frequencies(plain, 1) / inverse_frequencies(formula, 1)
    assert divisors[0] == 1.0
    assert divisors[-1] == pytest.approx(8.0)
    write_model(
        tmp_path / "m.gguf",
        "llama",
        make_model("llama", {}),
        lambda writer: writer.add_tensor("rope_freqs.weight", divisors.numpy()),
    )
    loaded = load_model(tmp_path / "m.gguf", load_ops(DEVICE, "reference"), DEVICE, lambda fraction: None)
    torch.testing.assert_close(inverse_frequencies(loaded.config.rope, 1), inverse_frequencies(formula, 1))


def test_rope_scaling_in_metadata(tmp_path: Path) -> None:
    def yarn(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    write_model(tmp_path / "m.gguf", "qwen2", make_model("qwen2", {}), yarn)
    rope = read_gguf_config(read_gguf(tmp_path / "m.gguf")).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 64)
    assert rope.attention_factor == pytest.approx(1.1386294)


@pytest.mark.parametrize("type_id", GGML_TYPES)
def test_expansion_equals_the_gguf_package(type_id: int) -> None:
    """Bit for bit, on random bytes with sane scales, for every type that the package can expand."""
    stored, kind = GGML_TYPES[type_id], GGMLQuantizationType(type_id)
    assert gguf.GGML_QUANT_SIZES[kind] == (stored.elements, stored.num_bytes)
    rows, columns = 3, 2 * max(stored.elements, 32)
    values = np.random.default_rng(type_id).normal(size=(rows, columns)).astype(np.float32)
    try:
        raw = gguf.quants.quantize(values, kind).view(np.uint8)
    except NotImplementedError:
        raw = np.random.default_rng(type_id).integers(0, 60, (rows, columns // stored.elements * stored.num_bytes))
        raw = raw.astype(np.uint8)
    expected = gguf.quants.dequantize(raw.view(np.float32) if type_id == 0 else raw, kind)
    target = torch.empty(rows, columns, dtype=torch.float32)
    dequantize(torch.from_numpy(raw.copy()).view(-1), type_id, target)
    assert np.array_equal(target.numpy().view(np.uint32), expected.astype(np.float32).view(np.uint32))
    assert plain_dtype(type_id).itemsize == (stored.num_bytes if stored.elements == 1 else 4)


def test_types_beyond_ours_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"type Q5_K need the optional package gguf: pip install 'firstlight"):
        dequantize(torch.zeros(176, dtype=torch.uint8), 13, torch.empty(256))


def test_every_name_is_translated_and_unknown_ones_are_kept() -> None:
    assert hf_key("blk.17.attn_q.bias") == "model.layers.17.self_attn.q_proj.bias"
    assert hf_key("output.weight") == "lm_head.weight"
    for unknown in (
        "blk.x.attn_q.weight",
        "blk.1.ffn_gate_exps.weight",
        "rope_freqs.weight",
        "token_embd",
        "",
        "a.b.c",
    ):
        assert hf_key(unknown) == unknown


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "gpt2"}, "general.architecture 'gpt2' is not supported; cohere2, command-r, "),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 2.5}, "llama.block_count must be an integer"),
        ({"llama.context_length": -1}, "llama.context_length must be a positive number"),
        ({"llama.attention.head_count_kv": [2, 2, 2]}, "must be a positive number, not [2, 2, 2]"),
        ({"llama.attention.value_length": 8}, "values of another length than keys"),
        ({"llama.rope.dimension_count": 8}, "rotating a part of a head"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "rope scaling 'longrope'"),
        ({"llama.rope.dimension_sections": [4, 4, 0, 0]}, "rotating by rows and columns of images"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
        ({"split.count": 3}, "is one of 3 files of a model; llama.cpp's llama-gguf-split --merge makes one of them"),
        ({"general.architecture": "clip"}, "is the image side of a model for llama.cpp"),
    ],
)
def test_config_refusals_name_the_key(tmp_path: Path, change: dict[str, object], words: str) -> None:
    write_model(tmp_path / "m.gguf", "llama", make_model("llama", {}))
    file = read_gguf(tmp_path / "m.gguf")
    changed = {key: value for key, value in (file.metadata | change).items() if value is not None}
    with pytest.raises(CheckpointError) as caught:
        read_gguf_config(GgufFile(path=file.path, metadata=changed, tensors=file.tensors))  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_rows_of_other_heads_than_the_metadata_says(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "llama", make_model("llama", {}))
    file = read_gguf(tmp_path / "m.gguf")
    file = replace(file, metadata=file.metadata | {"llama.attention.head_count": 6})
    config = read_gguf_config(file)
    with pytest.raises(
        CheckpointError, match=r"q_proj\.weight has shape \[64, 64\]; the architecture needs \[96, 64\]"
    ):
        check_keys(decoder_table(config), gguf_tensors(file, config), lambda key: False)


@pytest.mark.parametrize("divisor", [0.0, np.nan, np.inf])
def test_divisors_that_are_no_numbers(tmp_path: Path, divisor: float) -> None:
    divisors = np.array([1, 1, 1, 1, 2, 4, 8, divisor], dtype=np.float32)
    write_model(
        tmp_path / "m.gguf",
        "llama",
        make_model("llama", {}),
        lambda writer: writer.add_tensor("rope_freqs.weight", divisors),
    )
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must hold positive numbers"):
        read_gguf_config(read_gguf(tmp_path / "m.gguf"))
