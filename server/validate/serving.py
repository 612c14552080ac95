"""The server under validation: what it says and counts, and what its processes take. Used by `gate.py`."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from server.local_server import ServerDidNotStart, started_server

TITLE = "firstlight: "
METRICS_PREFIX = "firstlight:"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    """A running `firstlight serve`."""

    process: "subprocess.Popen[str]"
    url: str
    started: str
    """What it printed until it was ready."""
    http: httpx.Client
    log: Path
    log_start: int
    """Where its part of the log begins."""

    def logged(self) -> str:
        """All that it has written to the log."""
        return self.log.read_bytes()[self.log_start :].decode("utf-8", "replace")

    def is_running(self) -> bool:
        """Whether the supervisor is there."""
        return self.process.poll() is None

    def children(self) -> dict[str, psutil.Process]:
        """Its processes by title."""
        return children_of(self.process.pid)

    def metric(self, name: str) -> float:
        """A counter or gauge, added up over engines. Raises httpx.HTTPError."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == METRICS_PREFIX + name)

    def is_idle(self) -> bool:
        """Nothing runs or waits, and every block is free or only cached. Raises httpx.HTTPError."""
        now = self.http.get("/health/progress").json()
        return bool(now["running"] == now["waiting"] == 0 and now["free_blocks"] == now["total_blocks"])


def children_of(supervisor: int) -> dict[str, psutil.Process]:
    """The processes of a server by title, but for those that are just ending."""
    named: dict[str, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(supervisor).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(child.cmdline())
                if title.startswith(TITLE):
                    named[title.removeprefix(TITLE).strip()] = child
    return named


@contextlib.contextmanager
def started(arguments: Sequence[str], log: Path, headers: dict[str, str], timeout: float) -> Iterator[LocalServer]:
    """`serve` with these arguments, ready, on a port that is free; its log goes to a file, and a request may take
    `timeout` seconds. Raises ServerDidNotStart with the last lines that it wrote."""
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("a", encoding="utf-8"))
        log_start = errors.tell()
        try:
            child = stack.enter_context(started_server(*arguments, "--host", "127.0.0.1", errors=errors))
        except ServerDidNotStart as error:
            wrote = str(error) + log.read_text(encoding="utf-8", errors="replace")
            raise ServerDidNotStart("\n".join(wrote.strip().splitlines()[-8:]), error.code) from None
        http = httpx.Client(base_url=child.url, headers=headers, timeout=timeout, trust_env=False)
        yield LocalServer(
            process=child.process,
            url=child.url,
            started=child.said,
            http=stack.enter_context(http),
            log=log,
            log_start=log_start,
        )
