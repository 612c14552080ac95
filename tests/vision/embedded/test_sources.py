"""Packages of icons: checked by hash, rendered once."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from vision.embedded import sources
from vision.embedded.sources import SPRITE_SIDE, Package, SourceError, fetch, load_sprites
from vision.embedded.vocabulary import ICONS


def write_package(folder: Path, member: str, data: bytes) -> Package:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        info = tarfile.TarInfo(f"package/{member}")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    package = Package("@vendor/icons", "1.0.0", hashlib.sha256(file.getvalue()).hexdigest())
    (folder / package.file).write_bytes(file.getvalue())
    return package


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    package = write_package(tmp_path, "icons.json", b"{}")
    assert fetch(package, tmp_path) == tmp_path / "vendor-icons-1.0.0.tgz"
    (tmp_path / package.file).write_bytes(b"something else")
    with pytest.raises(SourceError, match=r"remove it and try again"):
        fetch(package, tmp_path)


def test_icons_are_rendered_once_in_the_order_of_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("resvg_py", reason="of the extra `train`")
    first, second, third = list(ICONS.values())[:3]
    square = {"body": '<path fill="#f00" d="M0 0h16v16H0z"/>'}
    wide = {"body": '<path fill="#00f" d="M0 0h32v16H0z"/>', "width": 32}
    icons = {"icons": {first: square, third: wide}, "width": 16, "height": 16}
    package = write_package(tmp_path, "icons.json", json.dumps(icons).encode())
    monkeypatch.setitem(sources.VENDORS, "vendor", package)
    sprites = load_sprites(tmp_path, "vendor")
    assert sprites.shape == (len(ICONS), SPRITE_SIDE, SPRITE_SIDE, 4)
    middle = SPRITE_SIDE // 2
    assert sprites[0, middle, middle].tolist() == [255, 0, 0, 255]
    assert second not in icons["icons"] and not sprites[1].any()
    assert sprites[2, middle, 2].tolist() == [0, 0, 255, 255] and not sprites[2, 2].any()
    (tmp_path / package.file).unlink()
    assert np.array_equal(load_sprites(tmp_path, "vendor"), sprites)
