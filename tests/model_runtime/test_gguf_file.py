"""The container of GGUF: parsed completely, or refused with a reason, whatever the bytes."""

import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_file import GgufFile, read_gguf


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    """49 152 tokens and 48 900 merges, the size of SmolLM2's; the best of three, in processor time, since machines are
    shared."""
    words = b"".join(text(f"Ġ{index:x}".encode()) for index in range(98_052))
    array = text(b"tokens") + struct.pack("<IIQ", 9, 8, 98_052) + words
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(header(3, 0, 1) + array)
    took = []
    for _ in range(3):
        started = time.process_time()
        file = read_gguf(path)
        took.append(time.process_time() - started)
    tokens = file.metadata["tokens"]
    assert isinstance(tokens, list)
    assert tokens[-1] == f"Ġ{98_051:x}"
    assert min(took) < 0.15


def test_reading_metadata_does_not_import_torch() -> None:
    program = "import sys, model_runtime.weights.gguf_file; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
