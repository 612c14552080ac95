"""A server as a child process, started as a user starts it, and ended whatever happens. Used by `firstlight chat` and
`firstlight validate`, in their processes.
"""

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from server.child_entry import following

END_SECONDS = 60.0
"""In which the child ends by itself after SIGTERM."""


class ServerDidNotStart(Exception):
    """The message is what it wrote."""

    def __init__(self, message: str, code: int) -> None:
        """`code` is that of its exit."""
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A server that is ready."""

    process: "subprocess.Popen[str]"
    url: str
    said: str
    """What it printed until then."""


@contextlib.contextmanager
def started_server(*arguments: str, errors: TextIO | None = None) -> Iterator[Started]:
    """`serve` with these arguments, ready, on a port that is free; what goes wrong is written to `errors`, or where
    this process writes it. Raises ServerDidNotStart."""
    command = following(signal.SIGTERM, "server.cli", "serve", *arguments, "--port", "0")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    try:
        yield _ready(process)
    finally:
        _end(process)


def _ready(process: "subprocess.Popen[str]") -> Started:
    """When it says where it is. A child that cannot start ends by itself."""
    assert process.stdout is not None
    said: list[str] = []
    url = ""
    for line in process.stdout:
        said.append(line)
        if " is ready on " in line:
            url = line.split(" is ready on ")[1].split(" ")[0]
        if url and line.startswith("curl "):
            return Started(process=process, url=url, said="".join(said))
    raise ServerDidNotStart("".join(said), process.wait())


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
