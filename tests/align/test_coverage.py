"""`firstlight ops`: what is measured of each operation, and what is said to fall back."""

import json
from pathlib import Path

import pytest

from model_runtime.align import coverage, timing
from model_runtime.align.coverage import Measured, calls_of, measure
from model_runtime.align.product import load_product
from model_runtime.align.prompts import seeded_prompts
from model_runtime.config import RuntimeConfig
from model_runtime.opening import open_checkpoint
from server import cli
from tests.checkpoints import make_checkpoint
from tests.family_cases import make_random_model
from tests.model_runtime import deepseek


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation is timed once."""
    monkeypatch.setattr(timing, "SECONDS", 0.0)


def measured(folder: Path, runtime: RuntimeConfig) -> list[Measured]:
    product = load_product(folder, runtime, lambda fraction: None)
    calls, plain = calls_of(folder, product, seeded_prompts((16, 16), product.decoder.config.vocab_size))
    return list(measure(product, plain, calls))


def test_compiled_and_reference(tmp_path: Path) -> None:
    make_random_model(tmp_path, "qwen2_moe", 0)
    found = measured(tmp_path, RuntimeConfig(prepare_weights=False, threads=1))
    used, others = ([entry for entry in found if entry.is_used is is_used] for is_used in (True, False))
    assert {entry.implementation for entry in used} == {"cpu"} and {entry.implementation for entry in others} == {
        "reference"
    }
    operations = {"embedding", "rms_norm", "linear", "rope_and_cache", "paged_attention", "silu_mul"}
    assert {entry.operation for entry in used} == operations
    assert all(0 <= entry.error < 1e-4 and entry.bytes_moved > 0 for entry in found)
    largest = max(used, key=lambda entry: entry.flops)
    assert (largest.operation, largest.shape, largest.flops) == ("linear", "26 x 64 -> 384", 2 * 26 * 64 * 384)
    assert largest.bytes_moved == 4 * (64 * 384 + 26 * 64 + 26 * 384)


def test_integers_are_farther_from_float64(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {})
    runtime = RuntimeConfig(prepare_weights=False, threads=1, quantization="int8")
    linear = [entry for entry in measured(tmp_path, runtime) if entry.operation == "linear"]
    assert {entry.is_used for entry in linear} == {False, True}
    assert all((1e-5 < entry.error < 1e-2) is entry.is_used for entry in linear)


def test_latent_attention(tmp_path: Path) -> None:
    deepseek.make_model({}).save_pretrained(tmp_path)
    found = measured(tmp_path, RuntimeConfig(prepare_weights=False, threads=1))
    assert {"latent_attention", "linear_heads", "rope_and_cache_latent"} <= {entry.operation for entry in found}
    assert all(entry.error < 1e-4 for entry in found)


def test_states(tmp_path: Path) -> None:
    make_random_model(tmp_path, "kimi_linear", 0)
    found = measured(tmp_path, RuntimeConfig(prepare_weights=False, threads=1))
    used = {entry.operation: entry for entry in found if entry.is_used and entry.step == "decode"}
    assert {"short_conv", "delta_rule", "latent_attention"} <= used.keys()
    assert all(entry.error < 1e-4 and entry.implementation == "cpu" for entry in used.values())
    rule = open_checkpoint(tmp_path).config.delta
    assert rule is not None
    state, rows = rule.value_heads * rule.key_dim * rule.value_dim, 2
    assert used["delta_rule"].flops == 6 * rows * state
    assert used["delta_rule"].bytes_moved > 2 * rows * 4 * state
    assert used["short_conv"].flops == 2 * rows * rule.channels * rule.conv_width


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels of its own a device falls back."""
    make_checkpoint(tmp_path, "llama", {})
    known = coverage.implementations
    monkeypatch.setattr(coverage, "implementations", lambda name: {"any": known(name)["any"]})
    with pytest.raises(SystemExit) as ended:
        cli.main(["ops", str(tmp_path), "--kernels", "reference", "--json", str(tmp_path / "ops.json")])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "computed by the reference, for want of one for the device: embedding, linear, paged_attention" in said
    document = json.loads((tmp_path / "ops.json").read_text())
    assert document["limits"]["flops"] > 0 and all(entry["falls_back"] for entry in document["operations"])


def test_nothing_is_measured_for_figures_that_have_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama", {})
    monkeypatch.setattr(coverage, "measure", lambda *arguments: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["ops", str(tmp_path), "--kernels", "reference", "--json", str(tmp_path / "none" / "ops.json")])
    assert ended.value.code == 2
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
