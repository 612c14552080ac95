"""The first code of a child process: hear of the supervisor's death, then run the child's own module.

`python -m server.child_entry SIGNAL MODULE ARGUMENTS...`. A file of its own, since what the modules import takes
seconds, in which the supervisor may die too.
"""

import ctypes
import importlib
import signal
import sys

PR_SET_PDEATHSIG = 1


def follow_parent(by: signal.Signals) -> None:
    """On Linux, this signal for the process when its parent ends. A pipe tells it too (`child.py`), but not while it is
    stopped or a library keeps the interpreter: SIGKILL ends it then. One that has something to clean up takes SIGCONT,
    and is at least not stopped any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def following(by: signal.Signals, module: str, *arguments: str) -> list[str]:
    """The command of a process that gets this signal when the one that starts it ends, however that dies."""
    return [sys.executable, "-m", "server.child_entry", str(int(by)), module, *arguments]


def main() -> None:
    """Entry of every child."""
    by, module = sys.argv[1:3]
    del sys.argv[1:3]
    follow_parent(signal.Signals(int(by)))
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
