"""Under what conditions figures were measured; written beside them. Used by `loadtest/command.py` and
docs/benchmarks/compare.py."""

import dataclasses
import datetime
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from loadtest.settings import Settings


def conditions(settings: Settings) -> dict[str, Any]:
    """JSON values: when, where, with what. The key of the server is left out."""
    asked = dataclasses.asdict(settings)
    del asked["api_key"]
    return surroundings() | {
        "command": without_key(sys.argv),
        "load_average_before": psutil.getloadavg(),
        "settings": asked,
    }


def surroundings() -> dict[str, Any]:
    """Those of any measurement."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "firstlight": importlib.metadata.version("firstlight"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _processor() -> str:
    """What the system calls it; on Linux for x86 that is its model."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def git_revision() -> str | None:
    """Commit of this source, with '+changes' where files differ from it; None outside a repository."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return result.stdout.strip()


def without_key(words: list[str]) -> list[str]:
    """A command line that may be shown."""
    shown = list(words)
    for index, word in enumerate(words):
        if word.startswith("--api-key="):
            shown[index] = "--api-key=..."
        elif index and words[index - 1] == "--api-key":
            shown[index] = "..."
    return shown
