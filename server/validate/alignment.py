"""`firstlight align`: the model against transformers or a file that another machine dumped, operation by operation.

A process of its own; its own report stands beside this one.
"""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

from server.child_entry import following
from server.validate.gate import Gate
from server.validate.result import StageResult, checked, skipped

NAME = "every operation is that of the reference"
PAGE, FIGURES = "align.html", "align.json"
MOST_SECONDS = 3600.0
EXIT_PASSED, EXIT_DIVERGES, EXIT_USAGE = 0, 1, 2


def run(gate: Gate) -> StageResult:
    """The stage."""
    gate.close()  # its memory is wanted
    gate.told(0.1, "firstlight align")
    figures = gate.folder / FIGURES
    command = following(signal.SIGKILL, "server.cli", "align", *gate.align_arguments)
    command += ["--json", str(figures), "--html", str(gate.folder / PAGE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return StageResult(checks=(checked(NAME, f"no end within {MOST_SECONDS:.0f} s", "firstlight align"),))
    said = (done.stderr or done.stdout).strip().splitlines()[-3:]
    if done.returncode == EXIT_USAGE:
        return StageResult(checks=(skipped(NAME, " ".join(said).removeprefix("firstlight: ")),))
    if done.returncode not in (EXIT_PASSED, EXIT_DIVERGES):
        return StageResult(checks=(checked(NAME, f"align ended with {done.returncode}: {' '.join(said)}", "align"),))
    return result_of(figures)


def result_of(path: Path) -> StageResult:
    """Of the figures that align wrote."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    problem = "" if found["passed"] else "; why: ".join([str(found["verdict"]), *map(str, found["suspects"])])
    return StageResult(
        checks=(checked(NAME, problem, f"{PAGE}, beside this report", value=str(found["first"] or "")),),
        facts=(f"{found['title']}: {found['verdict']} ({PAGE})",),
    )
