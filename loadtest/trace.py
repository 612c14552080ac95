"""Reads traces: JSON lines that say when each request is sent, and what it is. Used by `loadtest/runner.py`."""

from pathlib import Path
from typing import Any

import msgspec

from loadtest.arguments import MAX_COUNT
from loadtest.settings import LoadTestError


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request. Without messages it is random words of `input_tokens`."""

    offset: float
    """Seconds after the start of the replay."""
    output_tokens: int
    input_tokens: int = 0
    messages: tuple[dict[str, Any], ...] = ()


def read_trace(path: Path) -> list[TraceLine]:
    """The requests in the order of their time. Raises LoadTestError that names the line."""
    try:
        rows = path.read_bytes().splitlines()
    except OSError as error:
        raise LoadTestError(f"--trace {path}: {error.strerror}") from None
    found = [_line(row, f"--trace {path}, line {number}") for number, row in enumerate(rows, 1) if row.strip()]
    if not found:
        raise LoadTestError(f"--trace {path}: the file is empty")
    return sorted(found, key=lambda line: line.offset)


def _line(row: bytes, where: str) -> TraceLine:
    try:
        line = msgspec.json.decode(row, type=TraceLine)
    except msgspec.MsgspecError as error:
        example = '{"offset": 0.5, "input_tokens": 100, "output_tokens": 50}'
        raise LoadTestError(f"{where}: {error}; a line looks like {example}") from None
    if not line.offset >= 0 or not 1 <= line.output_tokens <= MAX_COUNT:
        raise LoadTestError(f"{where}: offset must be 0 or more and output_tokens 1 or more")
    if bool(line.messages) == (0 < line.input_tokens <= MAX_COUNT):
        raise LoadTestError(f"{where}: give input_tokens (1 or more) or messages")
    return line
