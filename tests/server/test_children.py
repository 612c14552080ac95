"""What an engine leaves behind, and which rank it was that ended it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from model_runtime.config import RuntimeConfig
from server.child import EXIT_BAD_CONFIGURATION, EXIT_ORPHANED
from server.children import Child, EngineProcess, cause

STARTER = """import subprocess
from pathlib import Path

def main():
    other = subprocess.Popen(["sleep", "600"])
    Path("PLACE.new").write_text(str(other.pid))
    Path("PLACE.new").rename("PLACE")
    other.wait()
"""


def test_the_files_of_ranks_end_with_them(tmp_path: Path) -> None:
    """Those of the next engine stay."""
    engine = EngineProcess(tmp_path, 3, RuntimeConfig(tensor_parallel_size=2))
    for name in ("g3-0", "g3-1", "g3.meet", "g30-1", "api.sock"):
        (tmp_path / name).touch()
    engine.end()
    assert engine.exit_code == -9
    assert {path.name for path in tmp_path.iterdir()} == {"g30-1", "api.sock"}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    """As compilers, which an engine waits for when it is ended."""
    (tmp_path / "starter.py").write_text(STARTER.replace("PLACE", str(tmp_path / "pid")))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    child = Child("starter", [], {"PYTHONPATH": path}, when_orphaned=signal.SIGKILL)
    wait_for((tmp_path / "pid").exists)
    other = int((tmp_path / "pid").read_text())
    assert is_running(other)
    child.end(0.0)
    assert child.exit_code == -signal.SIGKILL
    wait_for(lambda: not is_running(other))


def test_the_cause_is_not_the_rank_that_lost_another() -> None:
    assert cause([(1, 0), (-9, 1)]) == (-9, 1)
    assert cause([(EXIT_BAD_CONFIGURATION, 0), (EXIT_ORPHANED, 1)]) == (EXIT_BAD_CONFIGURATION, 0)
    assert cause([(70, 0), (EXIT_ORPHANED, 1)]) == (70, 0)
    assert cause([(EXIT_ORPHANED, 2), (EXIT_ORPHANED, 1)]) == (EXIT_ORPHANED, 1)
