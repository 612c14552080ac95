"""Real servers on loopback sockets, as a user starts them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import psutil
import pytest

from server.embedded import MODEL_NAME

START_TIMEOUT = 60.0


@dataclass
class Server:
    """A running `firstlight serve`."""

    process: "subprocess.Popen[str]"
    url: str
    output: list[str]
    model: str = MODEL_NAME

    def client(self, timeout: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout, limits=httpx.Limits(max_connections=600))

    def children(self) -> dict[str, psutil.Process]:
        """The API and engine processes by title."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        named = [(" ".join(child.cmdline()), child) for child in found]
        return {name.removeprefix("firstlight: ").strip(): child for name, child in named if "firstlight: " in name}

    def progress(self) -> dict[str, float]:
        return httpx.get(self.url + "/health/progress", timeout=10).json()

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.url + "/health/ready", timeout=5).status_code == 200
        return False

    def wait_for(self, condition: "Callable[[], bool]", seconds: float, what: str) -> float:
        """Seconds until the condition held. Fails the test when it does not within the time given."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < seconds, f"{what} did not happen within {seconds} s"
            time.sleep(0.02)
        return time.monotonic() - start


@contextlib.contextmanager
def run_server(*arguments: str, model: str = "embedded") -> Iterator[Server]:
    """Start a server on a free port, wait until it is ready, end it afterwards."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FIRSTLIGHT_")}
    environment |= {key: os.environ[key] for key in ("FIRSTLIGHT_CACHE_DIR",) if key in os.environ}
    command = [sys.executable, "-m", "server.cli", "serve", model, "--port", "0", "--no-access-log", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    output: list[str] = []
    url = ""
    deadline = time.monotonic() + START_TIMEOUT
    while not url and time.monotonic() < deadline and (line := process.stdout.readline()):
        output.append(line)
        if " is ready on " in line:
            url = line.split(" is ready on ")[1].split(" ")[0]
    try:
        assert url, f"the server did not start: {''.join(output)}"
        name = httpx.get(url + "/v1/models", timeout=10).json()["data"][0]["id"] if "--api-key" not in arguments else ""
        yield Server(process, url, output, name or MODEL_NAME)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        process.stdout.close()
        process.wait()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The embedded model with the default options."""
    with run_server() as running:
        yield running


def sse_events(lines: Iterator[str]) -> Iterator[dict[str, object]]:
    """The JSON events of a stream; the last is {'done': True} for [DONE]."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield {"done": True} if data == "[DONE]" else json.loads(data)
