"""GGUF files: parsed completely or refused, expanded bit for bit, and equal to the checkpoint they were made from."""

import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel

from model_runtime.blocks.rope import inverse_frequencies
from model_runtime.checkpoint import load_model
from model_runtime.config import RopeConfig
from model_runtime.ops import load_ops
from model_runtime.weights.dequantize import dequantize, plain_dtype
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_config import read_gguf_config
from model_runtime.weights.gguf_file import GGML_TYPES, GgufFile, read_gguf
from model_runtime.weights.gguf_source import hf_key
from tests.checkpoints import make_model
from tests.model_runtime.paged import DEVICE, PagedRun

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
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
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


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    divisors = inverse_frequencies(plain) / inverse_frequencies(formula)
    assert divisors[0] == 1.0
    assert divisors[-1] == pytest.approx(8.0)
    write_model(
        tmp_path / "m.gguf",
        "llama",
        make_model("llama", {}),
        lambda writer: writer.add_tensor("rope_freqs.weight", divisors.numpy()),
    )
    loaded = load_model(tmp_path / "m.gguf", load_ops(DEVICE, "reference"), DEVICE, lambda fraction: None)
    torch.testing.assert_close(inverse_frequencies(loaded.config.rope), inverse_frequencies(formula))


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
    with pytest.raises(CheckpointError, match=r"type Q4_K need the optional package gguf: pip install 'firstlight"):
        dequantize(torch.zeros(144, dtype=torch.uint8), 12, torch.empty(256))


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


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of metadata value and two tensors."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_string("text", "žluťoučký 👩‍👩‍👧‍👦")
    writer.add_array("strings", ["", "a", "Ġthe"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 2.0])
    writer.add_bool("yes", True)
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_int64("i64", -(2**63))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_float64("f64", 0.1)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(5, dtype=np.float16))
    finish(writer)
    return path


def test_values_and_tensors(small_file: Path) -> None:
    file = read_gguf(small_file)
    expected = {
        "text": "žluťoučký 👩‍👩‍👧‍👦",
        "strings": ["", "a", "Ġthe"],
        "ints": [1, -2, 3],
        "floats": [0.5, 2.0],
        "yes": True,
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "i64": -(2**63),
        "u64": 2**64 - 1,
        "f64": 0.1,
    }
    assert {key: file.metadata[key] for key in expected} == expected
    assert file.metadata["general.architecture"] == "llama"
    first, second = file.tensors["a"], file.tensors["b"]
    assert (first.shape, first.type_id, first.num_bytes) == ((2, 3), 0, 24)
    assert (second.shape, second.type_id, second.num_bytes) == ((5,), 1, 10)
    content = small_file.read_bytes()
    assert np.frombuffer(content, np.float32, 6, first.offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.frombuffer(content, np.float16, 5, second.offset).tolist() == [0, 1, 2, 3, 4]


def test_every_truncation_is_refused(small_file: Path, tmp_path: Path) -> None:
    content, path = small_file.read_bytes(), tmp_path / "cut.gguf"
    end = max(tensor.offset + tensor.num_bytes for tensor in read_gguf(small_file).tensors.values())
    for length in range(end):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: (truncated or damaged|not a GGUF)"):
            read_gguf(path)


def test_random_damage_never_crashes(small_file: Path, tmp_path: Path) -> None:
    """A changed byte gives a file that still parses, or a CheckpointError; never another exception, never slow."""
    content, path = small_file.read_bytes(), tmp_path / "damaged.gguf"
    generator, refused, started = random.Random(0), 0, time.monotonic()
    for _ in range(600):
        damaged = bytearray(content)
        for _ in range(generator.choice((1, 1, 4))):
            damaged[generator.randrange(len(content))] = generator.choice(
                (0, 1, 127, 128, 255, generator.randrange(256))
            )
        path.write_bytes(damaged)
        try:
            parsed: GgufFile | None = read_gguf(path)
        except CheckpointError:
            parsed, refused = None, refused + 1
        assert parsed is None or len(parsed.tensors) <= 2
    assert refused > 120
    assert time.monotonic() - started < 20


def header(version: int, num_tensors: int, num_values: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (header(1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648 is not supported"),
        (header(3, 2**63, 0), "a tensor name at byte 24 runs past the end"),
        (header(3, 0, 2**63), "a metadata key at byte 24 runs past the end"),
        (header(3, 0, 1) + struct.pack("<Q", 2**64 - 1), "a metadata key runs past the end"),
        (header(3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 2**60), "array 'k' at byte 49 runs past the end"),
        (header(3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 4, 2**62), "array 'k' at byte 49 runs past the end"),
        (header(3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "elements of type 9"),
        (header(3, 0, 1) + text(b"k") + struct.pack("<I", 77), "metadata key 'k' has unknown type 77"),
        (header(3, 0, 1) + text(b"\xff\xfe"), "is not UTF-8"),
        (header(3, 0, 2) + 2 * (text(b"k") + struct.pack("<IB", 0, 1)), "metadata key 'k' appears twice"),
        (header(3, 0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 24), "must be a power of two, not 24"),
        (header(3, 1, 0) + text(b"t") + struct.pack("<I", 5), "has 5 dimensions"),
        (header(3, 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 4, 99, 0), "ggml type 99"),
        (header(3, 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0), "does not divide into blocks of Q4_0"),
        (header(3, 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0), "does not divide into blocks of F32"),
        (header(3, 1, 0) + text(b"t") + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0), "tensor 't' needs bytes"),
        (header(3, 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 8) + bytes(64), "aligned to 32"),
        (header(3, 2, 0) + 2 * (text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) + bytes(64), "'t' appears twice"),
    ],
)
def test_hostile_files_are_refused_with_a_reason(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert words in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*none\.gguf: No such file"):
        read_gguf(tmp_path / "none.gguf")


def test_a_large_vocabulary_parses_quickly(tmp_path: Path) -> None:
    """49 152 tokens and 48 900 merges, the size of SmolLM2's; the best of three, since machines are shared."""
    words = b"".join(text(f"Ġ{index:x}".encode()) for index in range(98_052))
    array = text(b"tokens") + struct.pack("<IIQ", 9, 8, 98_052) + words
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(header(3, 0, 1) + array)
    took = []
    for _ in range(3):
        started = time.perf_counter()
        file = read_gguf(path)
        took.append(time.perf_counter() - started)
    tokens = file.metadata["tokens"]
    assert isinstance(tokens, list)
    assert tokens[-1] == f"Ġ{98_051:x}"
    assert min(took) < 0.15


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "gpt2"}, "general.architecture 'gpt2' is not supported; llama, qwen2, qwen3 are"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 2.5}, "llama.block_count must be an integer"),
        ({"llama.context_length": -1}, "llama.context_length must be a positive number"),
        ({"llama.attention.head_count_kv": [2, 2, 2]}, "must be a positive number, not [2, 2, 2]"),
        ({"llama.attention.value_length": 8}, "values of another length than keys"),
        ({"llama.rope.dimension_count": 8}, "rotating a part of a head"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "rope scaling 'longrope'"),
        ({"llama.expert_count": 8}, "mixtures of experts are not supported"),
    ],
)
def test_config_refusals_name_the_key(tmp_path: Path, change: dict[str, object], words: str) -> None:
    write_model(tmp_path / "m.gguf", "llama", make_model("llama", {}))
    file = read_gguf(tmp_path / "m.gguf")
    changed = {key: value for key, value in (file.metadata | change).items() if value is not None}
    with pytest.raises(CheckpointError) as caught:
        read_gguf_config(GgufFile(path=file.path, metadata=changed, tensors=file.tensors))  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_reading_metadata_does_not_import_torch() -> None:
    program = "import sys, model_runtime.weights.gguf_file; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
