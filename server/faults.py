"""Faults that tests ask for, by the cache salt of a request. Engine process, and only with --fault-hooks."""

import os
import signal
import time

from scheduler.request import Request

CRASH, KILL, STOP, HANG = b"fault:crash", b"fault:kill", b"fault:stop", b"fault:hang"
CRASH_EXIT_CODE = 70
HANG_SECONDS = 3600.0


def commit_fault(request: Request) -> None:
    """What the request asks for happens to the process."""
    if request.cache_salt == CRASH:
        os._exit(CRASH_EXIT_CODE)
    if request.cache_salt == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if request.cache_salt == STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    if request.cache_salt == HANG:
        time.sleep(HANG_SECONDS)
