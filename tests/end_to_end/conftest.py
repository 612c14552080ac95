"""Real servers on loopback sockets, as a user starts them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from server.embedded import MODEL_NAME
from server.tiny_vlm import write_tiny_vlm
from server.validate.serving import children_of

START_TIMEOUT = 60.0
BUFFERED_SECONDS = 0.3
"""Within these what an engine has sent is read, or some of it."""
SENDING_SECONDS = 1.0
"""For a few dozen requests to come to an engine; less than makes one count as silent."""


@dataclass
class Server:
    """A running `firstlight serve`."""

    process: "subprocess.Popen[str]"
    url: str
    output: list[str]
    model: str = MODEL_NAME

    def client(self, timeout: float = 60.0) -> httpx.Client:
        """Without certificates, which take longer to read than most requests do."""
        limits = httpx.Limits(max_connections=600)
        return httpx.Client(base_url=self.url, timeout=timeout, limits=limits, verify=False)

    @cached_property
    def http(self) -> httpx.Client:
        """One client for all tests of this server, closed before it."""
        return self.client()

    def post(self, path: str, **body: object) -> Any:
        """The JSON answer of a request that must succeed."""
        response = self.http.post(path, json={"model": self.model, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, **body: object) -> list[dict[str, Any]]:
        """The chunks of a stream that must end with [DONE]."""
        with self.http.stream("POST", path, json={"model": self.model, "stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            *chunks, last = sse_events(response.iter_lines())
        assert last == {"done": True}
        return chunks

    def metrics(self) -> dict[str, float]:
        """Samples without the prefix, added up over engines; the reason of an end stands after a colon:
        'request_success_total:stop'."""
        found = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                reason = sample.labels.get("finished_reason")
                name = sample.name.removeprefix("firstlight:") + (f":{reason}" if reason else "")
                before = found.get(name, 0.0) if "engine" in sample.labels else 0.0
                found[name] = before + sample.value
        return found

    def is_idle(self) -> bool:
        """Nothing runs or waits, and every block is free."""
        now = self.progress()
        return now["running"] == now["waiting"] == 0 and now["free_blocks"] == now["total_blocks"]

    def children(self) -> dict[str, psutil.Process]:
        """The API and engine processes by title, but for those that are just ending."""
        return children_of(self.process.pid)

    def stop_at_work(self, *titles: str) -> dict[str, psutil.Process]:
        """Stop processes of an engine, or the engines of replicas, if they are there and computing, or starting. If
        they are not, nothing is stopped or returned. What an engine had sent is read first: on a fast machine it is
        far ahead of those who read."""
        children = self.children()
        if not children.keys() >= set(titles):
            return {}
        stopped = {title: children[title] for title in titles}
        replicas = [int(title.split()[-1]) for title in titles if "replica" in title]
        _signal(stopped.values(), signal.SIGSTOP)
        before, now = None, self._states(replicas)
        while now != before:
            time.sleep(BUFFERED_SECONDS)
            before, now = now, self._states(replicas)
        if all(status != "idle" for status, _ in now):
            return stopped
        _signal(stopped.values(), signal.SIGCONT)
        return {}

    @contextlib.contextmanager
    def held(self, *titles: str) -> Iterator[None]:
        """Engines are stopped until what is begun within was sent to them, so that they find all of it together."""
        stopped = [self.children()[title] for title in titles]
        _signal(stopped, signal.SIGSTOP)
        try:
            yield
            time.sleep(SENDING_SECONDS)
        finally:
            _signal(stopped, signal.SIGCONT)

    def _states(self, replicas: list[int]) -> list[tuple[str, int]]:
        """Statuses and steps, as far as they are known, of these replicas, or of the only one."""
        progress = self.progress()
        engines = [progress["replicas"][number] for number in replicas] or [progress]
        return [(engine["status"], engine.get("steps", 0)) for engine in engines]

    def kill_at_work(self) -> bool:
        """Whether the engine was computing, and was killed then."""
        stopped = self.stop_at_work("engine")
        _signal(stopped.values(), signal.SIGKILL)
        return bool(stopped)

    def progress(self) -> dict[str, Any]:
        return self.http.get("/health/progress", timeout=10).json()

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.http.get("/health/ready", timeout=5).status_code == 200
        return False

    def wait_for(self, condition: "Callable[[], bool]", seconds: float, what: str) -> float:
        """Seconds until the condition held. Fails the test when it does not within the time given."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < seconds, f"{what} did not happen within {seconds} s"
            time.sleep(0.02)
        return time.monotonic() - start


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """To those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


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
        server = Server(process, url, output, name or MODEL_NAME)
        with server.http:
            yield server
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
    """The embedded model with the default options, but for embeddings, which it makes only if it is told how, and
    images, which it takes only with the image side that comes with it."""
    with run_server("--pooling", "mean", "--mmproj", "") as running:
        yield running


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model that takes pictures."""
    folder = tmp_path_factory.mktemp("tiny-vlm")
    write_tiny_vlm(folder)
    with run_server(model=str(folder)) as running:
        yield running


@pytest.fixture
def eyes_client(eyes: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=eyes.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def sse_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream; the last is {'done': True} for [DONE]."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield {"done": True} if data == "[DONE]" else json.loads(data)
