"""Prepared weights: mapped instead of made where nothing has changed, and made again where anything has."""

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from model_runtime.checkpoint import load_model
from model_runtime.models.decoder import Decoder
from model_runtime.quantized import quantize
from model_runtime.share import Share, split
from model_runtime.weights import prepared
from model_runtime.weights.load import EXACT, Precision
from model_runtime.weights.prepared import PreparedWeights, WeightCache
from model_runtime.weights.table import Parameters
from tests.checkpoints import make_checkpoint
from tests.model_runtime.memory import MODEL
from tests.model_runtime.op_cases import compiled, randn
from tests.model_runtime.paged import DEVICE, PagedRun

(WHOLE,) = split(MODEL, 1)


class Maker:
    """Makes some parameters and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Parameters:
        self.calls += 1
        ops = compiled()
        matrices = {
            "floats": ops.pack(randn(40, 64, seed=1)),
            "brain": ops.pack(randn(33, 64, seed=2).bfloat16()),
            "ints": ops.pack_quantized(quantize(randn(50, 64, seed=3), "q8_0"), 16),
        }
        return Parameters(matrices, {"norm": randn(7, seed=4)})


@pytest.fixture(autouse=True)
def _even_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "SMALLEST", 1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(3 * prepared.SAMPLED_BYTES))
    return path


def weights(
    tmp_path: Path, source: Path, precision: Precision = EXACT, *, shared: bool = False, share: Share = WHOLE
) -> PreparedWeights:
    return PreparedWeights(WeightCache(folder=tmp_path / "cache", shared=shared), [source], [], precision, share)


def assert_equal(found: Parameters, expected: Parameters) -> None:
    assert found.matrices.keys() == expected.matrices.keys()
    for name, matrix in expected.matrices.items():
        other = found.matrices[name]
        facts = (matrix.num_rows, matrix.num_columns, matrix.quantized, matrix.row_bits)
        assert (other.num_rows, other.num_columns, other.quantized, other.row_bits) == facts
        assert other.data.dtype == matrix.data.dtype and torch.equal(other.data, matrix.data)
    assert torch.equal(found.vectors["norm"], expected.vectors["norm"])


@pytest.mark.parametrize("shared", [True, False])
def test_second_start_takes_what_the_first_wrote(tmp_path: Path, source: Path, shared: bool) -> None:
    make = Maker()
    first = weights(tmp_path, source, shared=shared).get(make)
    second = weights(tmp_path, source, shared=shared).get(make)
    assert make.calls == 1
    assert all(matrix.data.data_ptr() % 64 == 0 for matrix in second.matrices.values())
    assert_equal(first, make())
    assert_equal(second, make())


class _Reluctant(io.FileIO):
    """Gives less than it is asked for, as the system does above 2 GiB."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:1000]) or 0


def test_all_is_read_where_the_system_gives_less_than_was_asked_for(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Maker()
    weights(tmp_path, source).get(make)

    def reluctant(path: Path, mode: str, buffering: int = -1) -> io.RawIOBase | io.BufferedReader:
        raw = _Reluctant(path, mode)
        return raw if buffering == 0 else io.BufferedReader(raw)

    monkeypatch.setattr(Path, "open", reluctant)
    assert_equal(prepared._open(weights(tmp_path, source).path, shared=False), make())


def test_weights_in_use_outlive_their_file(tmp_path: Path, source: Path) -> None:
    found = weights(tmp_path, source, shared=True).get(Maker())
    weights(tmp_path, source).path.unlink()
    assert_equal(found, Maker()())


def test_another_checkpoint_or_precision_is_another_file(tmp_path: Path, source: Path) -> None:
    paths = {weights(tmp_path, source).path}
    paths.add(weights(tmp_path, source, Precision(quantization="int8")).path)
    paths.add(weights(tmp_path, source, Precision()).path)
    status = source.stat()
    content = os.urandom(status.st_size)
    source.write_bytes(content)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))  # as rsync --times may leave another revision
    paths.add(weights(tmp_path, source).path)
    os.utime(source, ns=(0, 0))
    paths.add(weights(tmp_path, source).path)
    source.write_bytes(content + b"!")
    paths.add(weights(tmp_path, source).path)
    assert len(paths) == 6


@pytest.mark.parametrize("position", [0, 9, 5000, -40, -1])
def test_damage_is_noticed_and_mended(tmp_path: Path, source: Path, position: int) -> None:
    make = Maker()
    weights(tmp_path, source).get(make)
    path = weights(tmp_path, source).path
    content = bytearray(path.read_bytes())
    content[position] ^= 0x40
    path.write_bytes(content)
    assert_equal(weights(tmp_path, source).get(make), make())
    assert make.calls == 3
    weights(tmp_path, source).get(make)
    assert make.calls == 3


@pytest.mark.parametrize("size", [0, 7, 8, 4096, 4128, 8192 + 32])
def test_truncated_files_are_made_again(tmp_path: Path, source: Path, size: int) -> None:
    make = Maker()
    weights(tmp_path, source).get(make)
    os.truncate(weights(tmp_path, source).path, size)
    assert_equal(weights(tmp_path, source).get(make), make())


def test_only_the_last_used_are_kept(tmp_path: Path, source: Path) -> None:
    paths = []
    for size in range(prepared.MAX_MODELS + 2):
        source.write_bytes(b"x" * size)
        found = weights(tmp_path, source)
        found.get(Maker())
        os.utime(found.path, (size, size))
        paths.append(found.path)
    assert set((tmp_path / "cache").glob("weights-*")) == set(paths[-prepared.MAX_MODELS :])


def test_each_rank_has_a_file_of_its_own(tmp_path: Path, source: Path) -> None:
    """As many models are kept as with one rank."""
    paths = []
    for size in range(prepared.MAX_MODELS + 1):
        source.write_bytes(b"x" * size)
        for share in split(MODEL, 2):
            found = weights(tmp_path, source, share=share)
            found.get(Maker())
            os.utime(found.path, (size, size))
            paths.append(found.path)
    assert len(set(paths)) == len(paths)
    assert set((tmp_path / "cache").glob("weights-*")) == set(paths[2:])


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    assert_equal(weights(tmp_path, source).get(Maker()), Maker()())
    assert "cannot be kept" in caplog.text


def test_a_full_disk_costs_a_warning(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 2**20 - 1})())
    monkeypatch.setattr(Parameters, "num_bytes", 2**20)
    assert_equal(weights(tmp_path, source).get(Maker()), Maker()())
    assert "only 0 MiB are free" in caplog.text
    assert not list((tmp_path / "cache").glob("weights-*"))


def test_what_a_killed_server_left_is_written_over(tmp_path: Path, source: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "unfinished").write_bytes(b"x" * 100_000)
    make = Maker()
    weights(tmp_path, source).get(make)
    assert_equal(weights(tmp_path, source).get(make), Maker()())
    assert make.calls == 1
    assert {path.suffix for path in (tmp_path / "cache").iterdir() if path.name != "lock"} == {".bin"}


def test_a_file_that_cannot_be_opened_is_made_again(tmp_path: Path, source: Path) -> None:
    weights(tmp_path, source).get(Maker())
    path = weights(tmp_path, source).path
    path.unlink()
    path.mkdir()
    assert_equal(weights(tmp_path, source).get(Maker()), Maker()())


def test_small_models_are_not_written(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "SMALLEST", 2**20)
    weights(tmp_path, source).get(Maker())
    assert not list((tmp_path / "cache").glob("weights-*"))


def decoder(checkpoint: Path, cache: WeightCache | None) -> Decoder:
    seen: list[float] = []
    loaded = load_model(
        checkpoint, compiled(), DEVICE, seen.append, precision=Precision(quantization="int8"), cache=cache
    )
    assert seen[-1] == 1.0
    return loaded.decoder


def test_a_model_from_the_cache_computes_the_same(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "qwen2", {})
    huge, mapped = (WeightCache(folder=tmp_path / "cache", shared=shared) for shared in (False, True))
    caches = (None, huge, huge, mapped)
    logits = [PagedRun(decoder(tmp_path / "model", cache)).step({0: list(range(3, 36))})[0] for cache in caches]
    assert all(torch.equal(logits[0], others) for others in logits[1:])
