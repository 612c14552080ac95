"""Faults that tests ask for by the cache salt of a request, `fault:ACTION@POINT`, and only with --fault-hooks.

What they do to the process that reaches the point; `engine_faults.py` has the points of the engine, which are reached
with the request in it. Here is the one of the API process: `fault:block@api` keeps its event loop busy.
"""

import os
import signal
import time
from dataclasses import dataclass
from typing import Literal, get_args

from server import generation
from server.client import EngineClient
from server.generation import GenerationRequest

Action = Literal["crash", "kill", "stop", "hang", "delay", "block", "corrupt"]
PREFIX = b"fault:"
CRASH_EXIT_CODE = 70
HANG_SECONDS = 3600.0
DELAY_SECONDS = 1.0
BLOCK_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is to happen, and where."""

    action: Action
    point: str

    def happen(self) -> None:
        """To this process. What is corrupted is the business of the point."""
        if self.action == "crash":
            os._exit(CRASH_EXIT_CODE)
        if self.action in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)
        seconds = {"hang": HANG_SECONDS, "delay": DELAY_SECONDS, "block": BLOCK_SECONDS}.get(self.action, 0.0)
        time.sleep(seconds)


def fault_of(cache_salt: bytes) -> Fault | None:
    """What a request asks for; at the point `take` where it names none."""
    if not cache_salt.startswith(PREFIX):
        return None
    action, _, point = cache_salt.removeprefix(PREFIX).decode().partition("@")
    assert action in get_args(Action), f"{action} is no fault"
    return Fault(action=action, point=point or "take")  # type: ignore[arg-type]


class FaultyClient(EngineClient):
    """The gateway's side of the engine, with a fault before a request is sent to it."""

    def submit(
        self, requests: list[GenerationRequest], admission: generation.Admission
    ) -> list[generation.RequestStream]:
        """As of EngineClient."""
        for request in requests:
            fault = fault_of(request.cache_salt)
            if fault is not None and fault.point == "api":
                fault.happen()
        return super().submit(requests, admission)
