"""The finished stages of a validation, in a file, so that one that was interrupted goes on where it was.

A stage that passed is kept as long as its inputs are the same: model, options, settings, and the program itself.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from server.validate.result import StageResult

PACKAGES = ("server", "scheduler", "vision", "model_runtime", "loadtest")


@dataclass(slots=True, kw_only=True)
class Finished:
    """A stage, and a digest of what it depended on."""

    inputs: str
    result: StageResult


@dataclass(slots=True, kw_only=True)
class State:
    """The file's content."""

    stages: dict[str, Finished] = field(default_factory=dict)

    def passed(self, stage: str, inputs: str) -> StageResult | None:
        """What a stage found, if it passed with the same inputs."""
        found = self.stages.get(stage)
        return found.result if found is not None and found.inputs == inputs and not found.result.failed else None


def read(path: Path) -> State:
    """An empty state where there is no file, or one of another version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except (FileNotFoundError, msgspec.MsgspecError):
        return State()


def write(path: Path, state: State) -> None:
    """At once or not at all. Raises OSError."""
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1))
    part.replace(path)


def digest(*inputs: object) -> str:
    """Of anything whose repr says all."""
    return hashlib.sha256(repr(inputs).encode()).hexdigest()


def files_state(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Names, sizes and times of change: another content has another state."""
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(paths) if path.is_file()]


def program_state() -> list[tuple[str, int, int]]:
    """Of firstlight's own files."""
    root = Path(__file__).parent.parent.parent
    return files_state(
        path for package in PACKAGES for path in (root / package).rglob("*") if "__pycache__" not in path.parts
    )


def model_state(path: Path) -> list[tuple[str, int, int]]:
    """Of a checkpoint: a file, or all files of a folder."""
    return files_state([path] if path.is_file() else path.iterdir())
