"""What measuring costs: CPU of the client and of a local server, and how late the event loop is. Used by
`loadtest/runner.py`."""

import asyncio
import ipaddress
import socket
import time
from dataclasses import dataclass, field

import numpy as np
import psutil

from loadtest.http_client import Target

LAG_PERIOD_SECONDS = 0.01


class LagMonitor:
    """Wakes up every 10 ms and notes how much too late: what an arriving chunk may have waited for its time stamp."""

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            due = time.perf_counter() + LAG_PERIOD_SECONDS
            await asyncio.sleep(LAG_PERIOD_SECONDS)
            self._lags.append(time.perf_counter() - due)

    def percentile_ms(self, percent: float) -> float:
        """Milliseconds; 0 before the first sample."""
        return float(np.percentile(self._lags, percent)) * 1e3 if self._lags else 0.0


def find_server(target: Target) -> int | None:
    """The process that owns a server on this machine: the one that listens on its port, or its parent of the same
    program. None for servers elsewhere, and where the system does not tell."""
    if not _is_local(target.host):
        return None
    try:
        listening = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr[1:] == (target.port,)
        ]
        return _top(psutil.Process(min(listening))) if listening else None
    except (psutil.Error, OSError):
        return None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return host == "::1"


def _top(process: psutil.Process) -> int:
    """Climb while the parent is of the same program, but not to a script that started both server and client."""
    ours = {psutil.Process().pid} | {parent.pid for parent in psutil.Process().parents()}
    while (parent := process.parent()) is not None and parent.pid not in ours and parent.exe() == process.exe():
        process = parent
    return process.pid


@dataclass(slots=True)
class CpuMeter:
    """CPU seconds since `start`: of this process, and of a server's process with all that it started."""

    server_pid: int | None
    _client: float = 0.0
    _server: dict[int, float] = field(default_factory=dict)
    _wall: float = 0.0

    def start(self) -> None:
        """Begin a level."""
        self._wall, self._client, self._server = time.perf_counter(), time.process_time(), self._server_times()

    def cores(self) -> tuple[float, float | None]:
        """Cores kept busy on average by client and server; None for a server that is not seen."""
        wall = time.perf_counter() - self._wall
        client = (time.process_time() - self._client) / wall
        if self.server_pid is None or not (now := self._server_times()):
            return client, None
        return client, sum(spent - self._server.get(pid, 0.0) for pid, spent in now.items()) / wall

    def _server_times(self) -> dict[int, float]:
        if self.server_pid is None:
            return {}
        times = {}
        try:
            top = psutil.Process(self.server_pid)
            for process in (top, *top.children(recursive=True)):
                spent = process.cpu_times()
                times[process.pid] = spent.user + spent.system
        except psutil.Error:
            # It ended, or is not ours to look at: then its CPU is not known.
            return {}
        return times
