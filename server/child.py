"""What the API and engine processes have in common: how a child of the supervisor starts and when it must end.

The supervisor writes the number of the replica and the configuration as one line to a child's standard input and keeps
that pipe open; its end means that the supervisor is gone, however it died, and the child ends at once. With
`child_entry.py`, which sees to children that are stopped, no process is ever orphaned.
"""

import logging
import os
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import setproctitle

from server.config import ServeConfig, from_json

EXIT_BAD_CONFIGURATION = 2
"""A child's exit code for a fault that a restart cannot mend; its message is on standard error."""
EXIT_ORPHANED = 3
"""That of one whose supervisor or rank 0 has ended."""

STDIN = 0
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStart:
    """What a child is told."""

    config: ServeConfig
    run_dir: Path
    """A private folder for sockets; removed by the last process to leave."""
    replica: int
    """To which an engine or a rank belongs."""


def socket_path(run_dir: Path) -> Path:
    """The file of the socket on which the API process listens for the engine and the supervisor."""
    return run_dir / "api.sock"


def socket_address(run_dir: Path) -> str:
    """`socket_path` as ZeroMQ wants it."""
    return f"ipc://{socket_path(run_dir)}"


def _read_line() -> bytes:
    """Without Python's buffer: its lock would be held by the watching thread when the process ends."""
    line = b""
    while not line.endswith(b"\n"):
        if not (part := os.read(STDIN, 65536)):
            raise SystemExit(EXIT_ORPHANED)
        line += part
    return line


def _leave_when_orphaned(run_dir: Path) -> None:
    """Reads the descriptor, not `sys.stdin`: a thread inside a buffered read aborts the interpreter's normal exit."""
    while os.read(STDIN, 4096):
        pass
    shutil.rmtree(run_dir, ignore_errors=True)
    os._exit(EXIT_ORPHANED)


def start_child(title: str) -> ChildStart:
    """Read the configuration, set up logging, name the process and watch for the supervisor's end.

    Only the supervisor takes orders: a service manager that signals every process of the group must not cut answers off
    while the supervisor drains.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    setproctitle.setproctitle(f"firstlight: spare {title}")
    replica, _, line = _read_line().partition(b" ")
    config = from_json(line)
    is_one_of_several = config.process.data_parallel_size > 1 and title != "api"
    setproctitle.setproctitle(f"firstlight: {title}" + (f" of replica {int(replica)}" if is_one_of_several else ""))
    run_dir = Path(sys.argv[1])
    logging.basicConfig(level=config.process.log_level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    threading.Thread(target=_leave_when_orphaned, args=(run_dir,), daemon=True, name="orphan-watch").start()
    return ChildStart(config=config, run_dir=run_dir, replica=int(replica))
