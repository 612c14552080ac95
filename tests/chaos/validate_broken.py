"""A firstlight that is broken in one place, validated: the verdict must fail, and for the right reason.

`python -m tests.chaos.validate_broken` breaks it in all ways and prints what failed; `test_validate_broken.py` does one
in the suite.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from server.tiny_vlm import write_tiny_vlm
from tests.checkpoints import make_checkpoint

BROKEN = Path(__file__).parent / "broken"
SECONDS = 900.0
LEAK = "memory does not grow with requests: engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is broken, what is validated how, and the checks that must fail, and no others."""

    model: str
    flags: tuple[str, ...]
    failed: frozenset[str]
    broken: str = ""
    """A key of `sitecustomize.BREAKS`."""


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "nothing": Case(model="tiny-vlm", flags=("--quick", "--skip", "align,context,soak"), failed=frozenset()),
        "wrong rope, embedded": Case(
            model="embedded",
            flags=("--quick", "--only", "answers,preemption"),
            failed=frozenset({"known answers", "log-probabilities of transformers"}),
            broken="rope",
        ),
        "wrong rope, aligned": Case(
            model="llama",
            flags=("--quick", "--only", "align,answers"),
            failed=frozenset({"every operation is that of the reference"}),
            broken="rope",
        ),
        "broken projector": Case(
            model="tiny-vlm",
            flags=("--quick", "--only", "images"),
            failed=frozenset(
                {
                    "a blank picture is told from one that shows something",
                    "a picture is told from its shuffled tiles",
                    "two pictures of noise are told apart",
                }
            ),
            broken="projector",
        ),
        "leak": Case(
            model="tiny-vlm",
            flags=("--quick", "--only", "soak", "--soak-minutes", "0.5"),
            failed=frozenset({LEAK}),
            broken="leak",
        ),
        "slow kernels": Case(
            model="embedded",
            flags=("--quick", "--only", "curves", "--kernels", "reference"),
            failed=frozenset({"a stream alone reads the weights fast enough"}),
        ),
    }
)


def failed_checks(case: Case, folder: Path) -> dict[str, str]:
    """Validate; the checks that failed, with their reasons."""
    model = folder / case.model if case.model != "embedded" else None
    if case.model == "tiny-vlm":
        write_tiny_vlm(folder / case.model)
    elif case.model == "llama":
        make_checkpoint(folder / case.model, "llama", {"max_position_embeddings": 1024})
    environment = {name: value for name, value in os.environ.items() if name != "BROKEN"}
    if case.broken:
        path = os.pathsep.join(filter(None, (str(BROKEN), environment.get("PYTHONPATH", ""))))
        environment |= {"BROKEN": case.broken, "PYTHONPATH": path}
    report = folder / "report"
    command = [sys.executable, "-m", "server.cli", "validate", str(model or "embedded"), "--folder", str(report)]
    done = subprocess.run([*command, *case.flags], env=environment, timeout=SECONDS, capture_output=True, text=True)
    found = json.loads((report / "report.json").read_text())
    checks = [check for stage in found["stages"].values() for check in stage["checks"]]
    failed = {check["name"]: check["reason"] for check in checks if check["outcome"] == "failed"}
    assert done.returncode == (1 if failed else 0), done.stderr
    assert found["passed"] is not bool(failed)
    return failed


def main() -> int:
    """The command."""
    wrong = 0
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            failed = failed_checks(CASES[name], Path(folder))
        is_right = failed.keys() == CASES[name].failed
        wrong += not is_right
        print(f"{'as expected' if is_right else 'NOT AS EXPECTED'}: {name}", flush=True)
        for check, reason in failed.items():
            print(f"  {check}: {reason[:300]}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
