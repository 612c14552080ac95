"""`firstlight quality`: the figures are what their definitions say, zero against itself and more when quantised."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest

from model_runtime import executor
from server import quality_command
from server.cli import main
from server.options import OptionError
from server.quality import LOGITS, TOKENS, Comparison, compare
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "llama", {"num_hidden_layers": 1})
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Of 151 tokens, which leave a window of one that is dropped."""
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 3 + "0123456789abcdef")
    return path


def run(folder: Path, text: Path, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    quality_command.add_arguments(parser)
    words = [str(folder), "--text", str(text), "--window", "50", "--threads", "1", "--no-prepare-weights", *flags]
    return quality_command.run(parser.parse_args(words))


def test_figures() -> None:
    p, q = np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]), np.array([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    comparison = Comparison()
    # logits may be off by a constant
    comparison.add(np.log(p).astype(np.float32) + 7, np.log(q).astype(np.float32), np.array([1, 2], dtype=np.int32))
    found = comparison.result()
    kl = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert found.positions == 2
    assert found.agreement == 0.5
    assert found.mean_kl == pytest.approx(kl / 2, abs=1e-6)
    assert found.max_kl == pytest.approx(kl, abs=1e-6)
    assert found.median_kl == pytest.approx(kl / 2, abs=1e-6)
    assert found.p99_kl == pytest.approx(0.99 * kl, abs=1e-6)
    assert found.reference_perplexity == pytest.approx(4, abs=1e-5)
    assert found.perplexity == pytest.approx(math.sqrt(2 * 4), abs=1e-5)
    assert found.max_logit_difference == pytest.approx(7 + math.log(2), abs=1e-5)


def test_nothing_is_lost_against_itself_and_something_when_quantised(
    folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, text, "--json") == 0
    same = json.loads(capsys.readouterr().out)
    assert same["positions"] == 147
    assert same["max_kl"] == same["max_logit_difference"] == 0
    assert same["agreement"] == 1
    assert same["perplexity"] == same["reference_perplexity"]
    means = []
    for options in (("int8",), ("int8", "--activation-dtype", "int8"), ("int4",), ("int4-g128",)):
        assert run(folder, text, "--json", "--kernels", "reference", "--quantization", *options) == 0
        means.append(json.loads(capsys.readouterr().out)["mean_kl"])
    assert 1e-6 < means[0] < means[1] < means[2] / 2 < means[3] / 2


def test_rows_of_8_bits_beside_floats_are_refused(folder: Path, text: Path) -> None:
    with pytest.raises(OptionError, match="activation_dtype int8 is for 8-bit integers"):
        run(folder, text, "--activation-dtype", "int8", "--kernels", "reference")


def test_limits_decide_the_exit_code(folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, text, "--max-kl", "0", "--min-agreement", "1") == 0
    assert "top-1 agreement   100.00% of 147 positions" in capsys.readouterr().out
    rough = ("--quantization", "int4", "--kernels", "reference")
    assert run(folder, text, *rough, "--max-kl", "1e-9") == 1
    assert run(folder, text, *rough, "--min-agreement", "1.0") == 1


def test_dump_can_be_compared_with_any_logits(folder: Path, text: Path, tmp_path: Path) -> None:
    assert run(folder, text, "--dump", str(tmp_path / "kept")) == 0
    logits = np.load(tmp_path / "kept" / LOGITS)
    windows = json.loads((tmp_path / "kept" / TOKENS).read_text())
    assert [len(window) for window in windows] == [50, 50, 50]
    others = (logits[start : start + 49] * 2 for start in (0, 49, 98))
    assert compare(tmp_path / "kept", others).mean_kl > 0


def test_blocks_are_as_long_as_the_device_has_them(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(executor, "block_size", lambda device, configured: 256)
    assert run(folder, text, "--max-kl", "0") == 0
    assert "of 147 positions" in capsys.readouterr().out


def test_what_cannot_be_read_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "config.json").write_text("{}")
    for flags, message in (
        ([str(tmp_path)], "has no tokenizer.json"),
        ([str(folder), "--window", "4000"], "positions of the model"),
        ([str(folder), "--text", str(tmp_path / "none.txt")], "cannot read"),
        ([str(folder), "--text", str(tmp_path / "short.txt")], "too short to predict anything"),
        ([str(folder), "--window", "1"], "--window must be at least 2"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["quality", *flags])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
