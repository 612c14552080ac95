"""Reads the JSON files of a checkpoint. API and engine processes, each for its side; does not import torch."""

import json
from pathlib import Path

from model_runtime.weights.errors import CheckpointError


def read_json(path: Path) -> dict[str, object]:
    """The object in a file. Raises CheckpointError."""
    value = _read(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


def read_json_list(path: Path) -> list[object]:
    """The list in a file. Raises CheckpointError."""
    value = _read(path)
    if not isinstance(value, list):
        raise CheckpointError(f"{path}: must hold a JSON list")
    return value


def _read(path: Path) -> object:
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    return value


def read_json_if_any(path: Path) -> dict[str, object]:
    """As `read_json`, and empty where there is no such file."""
    return read_json(path) if path.is_file() else {}
