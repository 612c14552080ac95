"""Building, caching and binding the compiled kernels."""

import ctypes
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model_runtime.config import cache_dir
from model_runtime.kernels import build as building
from model_runtime.kernels.build import BuildError, build, describe
from model_runtime.kernels.library import SIGNATURES, library, open_library
from model_runtime.ops import load_ops
from model_runtime.ops.program_structures import (
    CHeads,
    CKVLayer,
    CLayer,
    CLowRank,
    CMatrix,
    CRope,
    CSharedRows,
    CStep,
    CStepBatch,
)
from model_runtime.ops.registry import select
from model_runtime.shared_collectives import CCollective

TINY_SOURCE = 'extern "C" long long fl_answer() { return 42; }\n'
BUILD_TINY = (
    "import sys; from pathlib import Path; from model_runtime.kernels import build as b\n"
    "b.SOURCE_DIR, b.SOURCES, b.HEADERS = Path(sys.argv[1]), ('tiny.cpp',), ()\n"
    "print(b.build())"
)
"""In a process of its own."""
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in building.COMPILERS), reason="no C++ compiler"
)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles in no time, and an empty cache; returns the cache folder."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cpp").write_text(TINY_SOURCE)
    monkeypatch.setattr(building, "SOURCE_DIR", sources)
    monkeypatch.setattr(building, "SOURCES", ("tiny.cpp",))
    monkeypatch.setattr(building, "HEADERS", ())
    monkeypatch.setenv("FIRSTLIGHT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def with_compiler(path: Path) -> dict[str, str]:
    return os.environ | {"CXX": str(path), "PYTHONPATH": str(Path(__file__).parents[2])}


def answer(path: Path) -> int:
    function = ctypes.CDLL(str(path)).fl_answer
    function.restype = ctypes.c_int64
    return int(function())


def test_cache_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIRSTLIGHT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "firstlight"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "firstlight"
    monkeypatch.setenv("FIRSTLIGHT_CACHE_DIR", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


@needs_compiler
def test_second_build_is_a_cache_hit_and_a_changed_source_is_not(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert describe().library is None
    with caplog.at_level(logging.WARNING):
        first = build()
        assert [record.message.split(" with ")[0] for record in caplog.records] == ["building CPU kernels"]
        assert build() == first == describe().library
        assert len(caplog.records) == 1
    assert answer(first) == 42
    (building.SOURCE_DIR / "tiny.cpp").write_text(TINY_SOURCE.replace("42", "43"))
    second = build()
    assert second != first
    assert answer(second) == 43
    assert {path.suffix for path in tiny.iterdir()} == {".so", ".lock"}


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_library_is_built_again(tiny: Path, damage: bytes | None) -> None:
    path = build()
    intact = path.read_bytes()
    path.write_bytes(intact[: len(intact) // 2] if damage is None else damage)
    assert describe().library is None
    assert answer(build()) == 42


@needs_compiler
def test_what_a_killed_build_left_is_removed_by_the_next(tiny: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {shutil.which("c++")} "$@"\nkill -9 $PPID\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-c", BUILD_TINY, str(building.SOURCE_DIR)]
    killed = subprocess.run(command, env=with_compiler(compiler), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert any(path.is_dir() for path in tiny.iterdir())
    build()
    assert not any(path.is_dir() for path in tiny.iterdir())


@needs_compiler
def test_processes_that_start_together_build_once(tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo x >> {log}\nexec {shutil.which("c++")} "$@"\n')
    compiler.chmod(0o755)
    environment = with_compiler(compiler)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD_TINY, str(building.SOURCE_DIR)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(3)
    ]
    paths = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(paths) == 1
    assert answer(Path(paths.pop())) == 42
    assert log.read_text().count("x") == 2, "one run of the compiler for the source and one for the library"


def test_without_a_compiler_the_reference_is_used_with_a_warning(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found \(no-such-compiler\); install g\+\+"):
        build()
    library.cache_clear()
    assert load_ops(torch.device("cpu"), "auto") == select("any")
    assert [(record.levelname, "slower" in record.message) for record in caplog.records] == [("WARNING", True)]
    assert "install g++" in caplog.text


@needs_compiler
def test_a_source_that_does_not_compile_is_a_build_error(tiny: Path) -> None:
    (building.SOURCE_DIR / "tiny.cpp").write_text("int broken(")
    with pytest.raises(BuildError, match=r"failed: .*tiny\.cpp"):
        build()
    assert {path.suffix for path in tiny.iterdir()} == {".lock"}


@needs_compiler
def test_a_cache_that_cannot_be_written_is_a_build_error(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FIRSTLIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError, match="set FIRSTLIGHT_CACHE_DIR"):
        build()


def test_a_file_that_is_no_library_is_a_build_error(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"not a library")
    with pytest.raises(BuildError, match="cannot load"):
        open_library(tmp_path / "x.so")


def test_signatures_are_those_of_the_sources() -> None:
    code = "".join((building.SOURCE_DIR / name).read_text() for name in building.SOURCES)
    for name, (result, arguments) in SIGNATURES.items():
        declared = re.search(rf"(void|int64_t) fl_{name}\(([^)]*)\)", code)
        assert declared is not None, name
        assert (declared[1] == "void") == (result is None), name
        kinds = {ctypes.c_void_p: r"\*", ctypes.c_int64: r"^(const )?int64_t \w+$", ctypes.c_float: r"^float \w+$"}
        parameters = [re.sub(r"\s+", " ", parameter).strip() for parameter in declared[2].split(",")]
        assert len(parameters) == len(arguments), name
        for parameter, kind in zip(parameters, arguments, strict=True):
            assert re.search(kinds[kind], parameter), f"{name}: {parameter}"


def test_structures_are_those_of_the_sources() -> None:
    code = "".join((building.SOURCE_DIR / name).read_text() for name in (*building.SOURCES, *building.HEADERS))
    types = {ctypes.c_int64: "int64_t", ctypes.c_float: "float", ctypes.c_void_p: "*"}
    for structure in (
        *(CMatrix, CLowRank, CHeads, CRope, CStepBatch, CKVLayer, CLayer),
        *(CSharedRows, CStep, CCollective),
    ):
        name = structure.__name__[1:]
        body = re.search(rf"struct {name} {{(.*?)}};", code, re.S)
        assert body is not None, name
        declared = []
        for declaration in re.sub(r"//.*| = \w+", "", body[1]).split(";")[:-1]:
            kind, names = re.fullmatch(r"\s*(?:const )?(\w+) ?(.*)", declaration, re.S).groups()
            fields = [field.split("=")[0] for field in names.split(",")]
            declared += [(field.strip(" *\n"), "*" if "*" in field else kind) for field in fields]
        expected = [(field, types.get(kind, kind.__name__[1:])) for field, kind in structure._fields_]
        assert declared == expected, name
