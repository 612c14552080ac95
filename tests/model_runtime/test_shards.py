"""Loading a checkpoint of twelve shards holds no second copy of anything, and what goes wrong at the seventh is said,
with nothing left behind."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_runtime.architecture import ModelConfig
from model_runtime.hf.config import read_hf_config
from model_runtime.models.decoder import decoder_table
from model_runtime.share import split
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.json_file import read_json
from model_runtime.weights.load import EXACT, Precision, load_parameters
from model_runtime.weights.safetensors_file import INDEX
from model_runtime.weights.safetensors_source import read_safetensors
from model_runtime.weights.table import Parameters
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.model_runtime.memory import measured_bytes
from tests.model_runtime.op_cases import EXACT as REFERENCE
from tests.model_runtime.op_cases import compiled
from tests.model_runtime.paged import DEVICE

NUM_SHARDS = 12
SEVENTH = "model-00007-of-00012.safetensors"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Twelve files with about as many bytes each, neighbours together."""
    total, done, weight_map = sum(tensor.nbytes for tensor in tensors.values()), 0, dict[str, str]()
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(NUM_SHARDS)]
    for key, tensor in tensors.items():
        number = done * NUM_SHARDS // total
        shards[number][key], done = tensor, done + tensor.nbytes
        weight_map[key] = f"model-{number + 1:05}-of-{NUM_SHARDS:05}.safetensors"
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-{number + 1:05}-of-{NUM_SHARDS:05}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def config_of(folder: Path) -> ModelConfig:
    return read_hf_config(read_json(folder / "config.json"), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of matrices of 1.1 to 6 MB, in bfloat16."""
    place = tmp_path_factory.mktemp("shards")
    (place / "config.json").write_text(json.dumps(CONFIG))
    shapes = {slot.key: p.slot_shape(slot) for p in decoder_table(config_of(place)) for slot in p.slots}
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(sum(torch.Size(shape).numel() for shape in shapes.values()), generator=generator).bfloat16()
    parts = numbers.split([torch.Size(shape).numel() for shape in shapes.values()])
    write_shards(place, {key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)})
    return place


def load(folder: Path, kernels: str = "compiled", precision: Precision = EXACT) -> Parameters:
    config = config_of(folder)
    ops = compiled() if kernels == "compiled" else REFERENCE
    (share,), table = split(config, 1), decoder_table(config)
    source = read_safetensors(folder)
    return load_parameters(table, source, ops, DEVICE, lambda key: False, lambda count: None, share, precision)


@pytest.mark.parametrize(
    ("kernels", "quantization"),
    [("compiled", "none"), ("compiled", "int8"), ("compiled", "int4"), ("reference", "none")],
)
def test_peak_is_the_weights_and_less_than_a_tensor(folder: Path, kernels: str, quantization: str) -> None:
    how = Precision(quantization=quantization)  # type: ignore[arg-type]
    resident = load(folder, kernels, how).num_bytes
    largest = max(tensor.nbytes for shard in folder.glob("*.safetensors") for tensor in load_file(shard).values())
    peak, left = measured_bytes(lambda: load(folder, kernels, how))
    assert left == 0
    assert resident < peak <= resident + largest
    if quantization == "none":
        assert peak <= resident + largest / 2  # a piece of it, however many matrices are fused


def edited_seventh(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SEVENTH)
    change(tensors)
    save_file(tensors, folder / SEVENTH)


def with_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[max(tensors)].view(-1)[-1] = torch.nan


def without_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(max(tensors))


def truncated(folder: Path) -> None:
    os.truncate(folder / SEVENTH, (folder / SEVENTH).stat().st_size - 1)


def bad_header(folder: Path) -> None:
    content = (folder / SEVENTH).read_bytes()
    (folder / SEVENTH).write_bytes(content[:8] + b"}" + content[9:])


def wrong_entry(folder: Path) -> None:
    content = (folder / SEVENTH).read_bytes()
    (folder / SEVENTH).write_bytes(content.replace(b'"dtype":"BF16"', b'"dtype":"F32" ', 1))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (
        truncated,
        rf"^/.*/{SEVENTH}: truncated or damaged: its tensors end at byte .*; copy or download .* again",
    ),
    "header": (bad_header, rf"^/.*/{SEVENTH}: truncated or damaged: its header is not JSON: .*; copy or download"),
    "entry": (wrong_entry, rf"^/.*/{SEVENTH}: truncated or damaged: the entry of model\..* is wrong; copy or download"),
    "lost": (
        lambda folder: (folder / SEVENTH).unlink(),
        rf"cannot read .*{SEVENTH}: No such file",
    ),
    "missing": (
        lambda folder: edited_seventh(folder, without_one),
        rf"^/.* lists tensors that their files do not hold: model\..* \({SEVENTH}\); copy or download",
    ),
    "nan": (
        lambda folder: edited_seventh(folder, with_nan),
        rf"NaN or infinite weights in model\.layers\.\d\..* \({SEVENTH}\): copy or download",
    ),
}


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """With a seventh shard of its own."""
    for path in folder.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    content = (tmp_path / SEVENTH).read_bytes()
    (tmp_path / SEVENTH).unlink()
    (tmp_path / SEVENTH).write_bytes(content)
    return tmp_path


def assert_refused(folder: Path, message: str) -> None:
    def refused() -> None:
        with pytest.raises(CheckpointError, match=message):
            load(folder)

    _, left = measured_bytes(refused)
    assert left == 0


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_the_seventh_shard(copied: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    damage(copied)
    assert_refused(copied, message)


def test_a_disk_that_fails_at_the_seventh_shard(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, seventh = os.preadv, (copied / SEVENTH).stat().st_ino

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(descriptor).st_ino == seventh:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    assert_refused(copied, rf"cannot read .*{SEVENTH}: Input/output error; copy or download")


def test_a_shard_that_becomes_shorter_while_it_is_read(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, seventh = os.preadv, (copied / SEVENTH).stat().st_ino

    def shortening(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(descriptor).st_ino == seventh:
            os.truncate(copied / SEVENTH, offset + 10)
            monkeypatch.setattr(os, "preadv", preadv)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", shortening)
    assert_refused(copied, rf"^/.*/{SEVENTH}: truncated or damaged: it ends at byte \d+, while it is read; copy")


def test_serve_ends_and_leaves_nothing(tmp_path: Path) -> None:
    place, temporary = tmp_path / "model", tmp_path / "tmp"
    temporary.mkdir()
    make_checkpoint(place, "llama", {})
    make_tokenizer().save_pretrained(place)
    tensors = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    write_shards(place, tensors)
    edited_seventh(place, with_nan)
    environment = os.environ | {"TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "server.cli", "serve", str(place), "--port", "0", "--kernels", "reference"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 2
    assert f"({SEVENTH}): copy or download the file again" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(temporary.iterdir()) == []
