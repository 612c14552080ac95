"""`firstlight align` as people run it: exit codes, reports, and files between machines."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from model_runtime.weights import safetensors_source
from model_runtime.weights.safetensors_file import SafetensorsEntry, read_header
from server import cli
from tests.checkpoints import make_checkpoint
from tests.family_cases import make_random_model

LONGROPE = 0
"""A seed of phi3 with factors for texts above 256 tokens."""
CUT = ("--no-prepare-weights", "--threads", "1")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["align", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, "qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    return folder


@pytest.fixture(scope="module")
def dump(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dump") / "reference.safetensors"
    assert run(str(folder), "--dump", str(path)) == 0
    return path


def test_aligned_with_transformers(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, document = tmp_path / "report.html", tmp_path / "report.json"
    assert run(str(folder), "--html", str(page), "--json", str(document), *CUT) == 0
    assert "PASSED: product and reference are the same but for rounding" in capsys.readouterr().out
    found = json.loads(document.read_text())
    assert found["passed"] and found["first"] is None and found["logits"]["agreement"] == 1.0
    # 2 places of the stream, 3 inputs, 2 norms, 7 linear layers, 2 norms of heads, 2 rotations, attention, activation
    assert len([place for place in found["places"] if place["layer"] == 1]) >= 19
    assert page.read_text().count("<svg") >= 2 and "layers.2.self_attn.k_rope.out" in page.read_text()


def test_each_file_is_opened_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint of hundreds of files that takes a while."""
    opened: list[str] = []

    def counted(path: Path) -> dict[str, SafetensorsEntry]:
        opened.append(path.name)
        return read_header(path)

    monkeypatch.setattr(safetensors_source, "read_header", counted)
    assert run(str(folder), *CUT) == 0
    assert opened == ["model.safetensors"]


def test_a_file_says_what_is_wrong(
    folder: Path, dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On a machine without transformers."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(str(folder), "--reference", str(dump), *CUT) == 0
    capsys.readouterr()
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in folder.iterdir():
        text = file.read_bytes().replace(b'"rope_theta": 10000.0', b'"rope_theta": 500000.0')
        (changed / file.name).write_bytes(text)
    assert run(str(changed), "--reference", str(dump), "--html", str(tmp_path / "report.html"), *CUT) == 1
    said = capsys.readouterr().out
    assert "FAILED: layers.0.self_attn.q_rope.out (rope: " in said
    assert "why: rope base: 10000 in the reference, 500000 in the product" in said
    assert "rope base: 10000" in (tmp_path / "report.html").read_text()


def test_without_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(str(folder), *CUT) == 2
    assert "pip install 'firstlight[align]', or give --reference a file" in capsys.readouterr().err


def test_options_are_refused_before_the_reference_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which here cannot be."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(str(folder), "--pipeline-parallel-size", "2", *CUT) == 2
    assert "align divides layers alone" in capsys.readouterr().err


def test_files_that_are_no_references(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "reference.safetensors"
    assert run(str(folder), "--reference", str(path)) == 2
    assert f"cannot read the reference {path}" in capsys.readouterr().err
    assert run(str(folder), "--reference", str(folder / "model.safetensors")) == 2
    assert "is no reference of this version of firstlight" in capsys.readouterr().err
    assert run(str(folder), "--reference", str(path), "--dump", str(path)) == 2
    assert "leave --reference out" in capsys.readouterr().err
    assert run(str(folder), "--dump", str(tmp_path / "no folder" / "file")) == 2
    assert f"there is no folder {tmp_path / 'no folder'}" in capsys.readouterr().err
    assert run(str(folder), "--dump", str(tmp_path)) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_file_has_been_computed(folder: Path, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for dtype in ("float32", "bfloat16"):
        assert run(str(folder), "--reference", str(dump), "--dtype", dtype) == 2
        assert "a file has been computed: leave --dtype out" in capsys.readouterr().err


def test_a_length_that_no_memory_has(tmp_path: Path, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless it is limited, as `serve` is."""
    make_checkpoint(tmp_path, "qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**12}))
    capsys.readouterr()
    assert run(str(tmp_path), "--reference", str(dump), *CUT) == 2
    said = capsys.readouterr().err
    assert said.startswith("firstlight: rotations of 1000000000000 positions take ") and said.count("\n") == 1
    assert said.endswith("may be taken: set max_model_len to less\n")
    assert run(str(tmp_path), "--reference", str(dump), "--max-model-len", "41", *CUT) == 0
    capsys.readouterr()
    assert run(str(tmp_path), "--reference", str(dump), "--max-model-len", "40", *CUT) == 2
    assert "a prompt of 41 tokens, and the product takes 40" in capsys.readouterr().err
    assert run(str(tmp_path), "--max-model-len", "40", *CUT) == 0
    assert run(str(tmp_path), "--max-model-len", str(10**12 + 1), *CUT) == 2
    assert "exceeds the 1000000000000 positions of the model" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_nothing_is_compared_for_a_report_that_has_no_folder(
    option: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none"
    assert run(str(folder), "--reference", str(tmp_path / "neither"), option, str(missing / "report")) == 2
    assert f"there is no folder {missing}" in capsys.readouterr().err


def test_another_models_reference(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "llama", {"vocab_size": 300})
    assert run(str(tmp_path), "--reference", str(dump), *CUT) == 2
    assert "a vocabulary of 259 tokens, and the model one of 300" in capsys.readouterr().err
    make_checkpoint(tmp_path, "llama", {"max_position_embeddings": 40})
    assert run(str(tmp_path), "--reference", str(dump), *CUT) == 2
    assert "a prompt of 41 tokens, and the product takes 40" in capsys.readouterr().err


def test_half_precision(tmp_path: Path) -> None:
    """Weights of bfloat16 are computed in float32, by both unless the reference is asked for less."""
    make_checkpoint(tmp_path, "llama", {}, torch.bfloat16)
    assert run(str(tmp_path), *CUT) == 0
    assert run(str(tmp_path), "--dtype", "bfloat16", *CUT) == 0


def test_integers(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compared with the floats that they mean; what they lose is told beside."""
    path = tmp_path / "reference.safetensors"
    assert run(str(folder), "--quantization", "int4", "--dump", str(path)) == 0
    assert run(str(folder), "--quantization", "int4", "--reference", str(path), *CUT) == 0
    said = capsys.readouterr().out
    assert "with int4 expanded" in said and "top-1 agreement 100.00%" in said
    assert "what quantisation loses, for information: KL from the unquantised model" in said
    assert run(str(folder), "--reference", str(path), *CUT) == 2
    assert "the reference is of --quantization int4, and the product is asked for none" in capsys.readouterr().err


def test_integers_with_tied_embeddings(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {"tie_word_embeddings": True})
    assert run(str(tmp_path), "--quantization", "int8", *CUT) == 0


def test_rows_of_8_bits(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Products may differ by more, everything else by no more than ever: norms of another epsilon are found."""
    narrow = ("--quantization", "int8", "--activation-dtype", "int8")
    assert run(str(folder), *narrow, *CUT) == 0
    other, path = tmp_path / "other", tmp_path / "reference.safetensors"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert run(str(folder), *narrow, "--dump", str(path)) == 0
    capsys.readouterr()
    assert run(str(other), *narrow, "--reference", str(path), *CUT) == 1
    assert "layers.0.input_layernorm.out (norm" in capsys.readouterr().out


def test_longrope_is_that_of_the_longest_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers changes factors with the text, the product with what it is told to serve."""
    make_random_model(tmp_path, "phi3", LONGROPE, {"max_position_embeddings": 512})
    assert run(str(tmp_path), *CUT) == 1
    assert "why: LongRoPE: factors for short texts in the reference; max_model_len 256 gives" in capsys.readouterr().out
    assert run(str(tmp_path), "--max-model-len", "256", *CUT) == 0
