"""What this machine can do at the moment: `python -m server.validate.machine` prints the rates as a JSON line.

A process of its own, since torch is nowhere else in a validation. Used by `curves.py`, in the same minutes as what is
held against it, so that a machine that is busy with something else is held against what it has left.
"""

import json
import signal
import subprocess
from dataclasses import asdict, dataclass

from server.child_entry import following

SECONDS = 1.0
"""For each rate; the best of as many runs as fit."""
MOST_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the cores that a process may use."""

    read_bytes_s: float
    """Of memory."""
    flops: float
    """Of torch's float32 product of two large matrices."""


def measured() -> Limits | None:
    """Measure now; None where it comes to no end."""
    command = following(signal.SIGKILL, "server.validate.machine")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=True)
        return Limits(**json.loads(found.stdout))
    except (subprocess.SubprocessError, ValueError, TypeError):
        return None


def main() -> None:
    """The child."""
    from model_runtime.host import usable_cores
    from model_runtime.kernels.bench import read_bandwidth
    from model_runtime.kernels.bench_linear import gemm_rate
    from model_runtime.ops import set_threads

    set_threads(usable_cores())
    print(json.dumps(asdict(Limits(read_bytes_s=read_bandwidth(SECONDS), flops=gemm_rate(SECONDS)))))


if __name__ == "__main__":
    main()
