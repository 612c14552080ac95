"""The embedded model takes images by default exactly where its image side is there and whole."""

import argparse
import hashlib
from pathlib import Path

import pytest

from server import config, doctor
from server.config import add_arguments, resolve
from server.embedded import EmbeddedModelMissing, embedded_mmproj


def mmproj(*arguments: str) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return resolve(parser.parse_args(arguments), {}).runtime.mmproj


def make_folder(folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes(b"numbers")
    digest = hashlib.sha256(b"numbers").hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest}  model.safetensors\n")
    return folder


def test_the_default_is_for_the_embedded_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path)
    monkeypatch.setattr(config, "embedded_mmproj", lambda: embedded_mmproj(folder))
    assert mmproj() == mmproj("embedded") == str(folder)
    assert mmproj("other.gguf") == mmproj("--mmproj", "") == ""
    assert mmproj("--mmproj", "mine") == mmproj("other.gguf", "--mmproj", "mine") == "mine"


def test_files_that_are_not_there_are_not_claimed(tmp_path: Path) -> None:
    assert embedded_mmproj(tmp_path) == embedded_mmproj(tmp_path / "nowhere") == ""
    (tmp_path / "README.md").write_text("no weights yet")
    assert embedded_mmproj(tmp_path) == ""


@pytest.mark.parametrize("content", [b"numberz", None])
def test_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    folder = make_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    if content is not None:
        (folder / "model.safetensors").write_bytes(content)
    monkeypatch.setattr(config, "embedded_mmproj", lambda: embedded_mmproj(folder))
    with pytest.raises(EmbeddedModelMissing, match=r"model.safetensors is not what SHA256SUMS records; install"):
        mmproj()
    assert mmproj("--mmproj", "") == ""
    monkeypatch.setattr(doctor, "embedded_mmproj", lambda: embedded_mmproj(folder))
    assert (found := doctor.check_eyes()).state == "warning" and "install firstlight again" in found.advice


def test_doctor_says_whether_it_takes_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "embedded_mmproj", lambda: embedded_mmproj(tmp_path))
    assert "takes no images" in doctor.check_eyes().detail
    make_folder(tmp_path)
    assert doctor.check_eyes().detail == str(tmp_path)
