"""`firstlight doctor`: what this machine has, what is missing, and what to do about it. A process of its own.

With `--make-tiny-vlm DIR` it checks nothing and writes a model to try images with (`server/tiny_vlm.py`).
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from server.embedded import EmbeddedModelMissing, embedded_mmproj, embedded_path
from server.serve_command import gib
from server.tiny_vlm import WARNING, write_tiny_vlm

MIN_FREE_BYTES = 2 * 2**30
LIBRARIES = (
    "torch",
    "fastapi",
    "uvicorn",
    "tokenizers",
    "safetensors",
    "msgspec",
    "pyzmq",
    "numpy",
    "pillow",
    "httpx",
    "llguidance",
)
MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "failed": "[red]failed[/red]"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. `state` is ok, warning (works, but slower or less) or failed (cannot serve)."""

    subject: str
    state: str
    detail: str
    advice: str = ""


def _check_python() -> Finding:
    return Finding(subject="Python", state="ok", detail=f"{platform.python_version()} on {platform.platform()}")


def _check_libraries() -> Finding:
    found, missing = [], []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        detail = "missing: " + ", ".join(missing)
        return Finding(subject="libraries", state="failed", detail=detail, advice="run make install")
    return Finding(subject="libraries", state="ok", detail=", ".join(found))


def _check_extra(extra: str, package: str, purpose: str) -> Finding:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        advice = f"{sys.executable} -m pip install 'firstlight[{extra}]' to {purpose}"
        return Finding(subject=f"{extra} extra", state="warning", detail="not installed", advice=advice)
    return Finding(subject=f"{extra} extra", state="ok", detail=f"{package} {version}")


def _check_processor() -> Finding:
    from model_runtime.host import usable_cores

    cores = usable_cores()
    advice = "" if cores > 1 else "gateway and engine share one core: expect slower answers"
    detail = f"{platform.machine()}, {cores} of {os.cpu_count()} cores usable"
    return Finding(subject="processor", state="ok" if cores > 1 else "warning", detail=detail, advice=advice)


def _check_memory() -> Finding:
    from model_runtime.host import available_memory

    free = available_memory()
    detail = f"{gib(free)} free of {gib(psutil.virtual_memory().total)}"
    if free < MIN_FREE_BYTES:
        return Finding(subject="memory", state="warning", detail=detail, advice="set --memory-budget, or free some")
    return Finding(subject="memory", state="ok", detail=detail)


def _check_devices() -> Finding:
    import torch

    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    detail = (
        f"cpu{''.join(', ' + name for name in cuda)} (torch {torch.__version__}, {torch.get_num_threads()} threads)"
    )
    advice = "serving on a GPU has not been tested on a card yet; --device cpu does without it" if cuda else ""
    return Finding(subject="devices", state="ok", detail=detail, advice=advice)


def _check_kernels() -> Finding:
    import torch  # noqa: F401  its OpenMP library must be loaded first

    from model_runtime.kernels.build import BuildError, build, describe

    try:
        path = build()
        info = describe()
    except BuildError as error:
        return Finding(subject="CPU kernels", state="warning", detail=str(error), advice="plain torch is used: slower")
    return Finding(subject="CPU kernels", state="ok", detail=f"{info.compiler_version}; {path}")


def _check_embedded() -> Finding:
    try:
        path = embedded_path()
    except EmbeddedModelMissing as error:
        return Finding(subject="embedded model", state="warning", detail="not fetched", advice=str(error))
    return Finding(subject="embedded model", state="ok", detail=f"{path} ({path.stat().st_size / 2**20:.0f} MiB)")


def check_eyes() -> Finding:
    """The image side of the embedded model."""
    try:
        folder = embedded_mmproj()
    except EmbeddedModelMissing as error:
        return Finding(subject="embedded images", state="warning", detail="damaged", advice=str(error))
    return Finding(subject="embedded images", state="ok", detail=folder or "none: the embedded model takes no images")


def check_families() -> Finding:
    """Packages that bring families of models, and what is wrong with those that do not load."""
    from model_runtime.models.packages import family_named, packaged_families
    from model_runtime.weights.errors import CheckpointError

    found, broken = [], []
    for name, package in packaged_families():
        try:
            family_named(name)
            found.append(f"{name} ({package})")
        except CheckpointError as error:
            broken.append(str(error))
    if broken:
        advice = "other models are served all the same; mend or uninstall it to serve its own"
        return Finding(subject="families", state="warning", detail="\n".join(broken), advice=advice)
    return Finding(subject="families", state="ok", detail=", ".join(found) or "no packages beside firstlight's own")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _check_python,
    _check_libraries,
    partial(_check_extra, "gguf", "gguf", "serve K-quants"),
    partial(_check_extra, "heic", "pillow-heif", "read pictures as iPhones store them"),
    _check_processor,
    _check_memory,
    _check_devices,
    _check_kernels,
    _check_embedded,
    check_eyes,
    check_families,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--make-tiny-vlm",
        metavar="DIR",
        type=Path,
        help="write a tiny vision-language model with random weights to DIR, to try images with, and do nothing else",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check everything and report; 1 when something would keep the server from running."""
    if arguments.make_tiny_vlm is not None:
        return _make_tiny_vlm(arguments.make_tiny_vlm)
    findings = [check() for check in CHECKS]
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = Table("subject", "state", box=None, pad_edge=False, header_style="bold")
        table.add_column("found", overflow="fold")
        for finding in findings:
            advice = f"\n→ {finding.advice}" if finding.advice else ""
            table.add_row(finding.subject, MARKS[finding.state], escape(finding.detail + advice))
        Console(emoji=False).print(table, highlight=False)
    return int(any(finding.state == "failed" for finding in findings))


def _make_tiny_vlm(folder: Path) -> int:
    try:
        write_tiny_vlm(folder)
    except OSError as error:
        print(f"firstlight: {error}", file=sys.stderr)
        return 1
    print(f"{folder} holds a tiny vision-language model. {WARNING}\nServe it with: firstlight serve {folder}")
    return 0
