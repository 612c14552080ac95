"""Writes a run as JSON: conditions, figures, and one line of figures a request. Used by `loadtest/command.py`."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.record import Record
from loadtest.runner import LevelResult, Subject


def document(conditions: dict[str, Any], subjects: Sequence[Subject], results: Sequence[LevelResult]) -> dict[str, Any]:
    """JSON values of the whole run."""
    return {
        "conditions": conditions,
        "servers": [
            {
                "name": subject.server.name,
                "url": subject.server.url,
                "model": subject.model,
                "calibration": dataclasses.asdict(subject.calibration),
            }
            for subject in subjects
        ],
        "results": [_result(result) for result in results],
    }


def _result(result: LevelResult) -> dict[str, Any]:
    start = min(record.start for record in result.records)
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    values = {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
        for name, value in fields.items()
    }
    return values | {"records": [_request(record, start) for record in result.records]}


def _request(record: Record, start: float) -> dict[str, Any]:
    """Seconds after the start of the level, and milliseconds."""
    row: dict[str, Any] = {"start_s": round(record.start - start, 6), "input_tokens": record.input_tokens}
    if record.error:
        return row | {"error": record.error, "detail": record.detail}
    tpot = record.tpot
    return row | {
        "output_tokens": record.num_output_tokens,
        "cached_tokens": record.cached_tokens,
        "ttft_ms": round(record.ttft * 1e3, 3),
        "tpot_ms": None if tpot is None else round(tpot * 1e3, 3),
        "e2e_ms": round(record.latency * 1e3, 3),
        "itl_ms": [round(gap * 1e3, 3) for gap in record.gaps],
    }


def write(path: Path, values: dict[str, Any]) -> None:
    """Paths become text; everything else is JSON already."""
    path.write_text(json.dumps(values, indent=1, default=str) + "\n")
