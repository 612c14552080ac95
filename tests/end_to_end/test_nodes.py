"""Two machines, both of them this one, that share a model: one speaks to clients and has the first layers, the other
has the last ones."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.tiny_vlm import write_tiny_vlm
from tests.end_to_end.conftest import Server, run_server
from tests.ports import free_port

ASK = {"prompt": "one two three " * 4, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """That of machine 0, while machine 1 runs."""
    write_tiny_vlm(tmp_path / "tiny")
    port = str(free_port(count=5))  # where ranks meet, and one for each rank
    sizes = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--nnodes", "2"]
    options = [*sizes, "--master-port", port, "--max-model-len", "256"]
    command = [sys.executable, "-m", "server.cli", "serve", str(tmp_path / "tiny"), *options, "--node-rank", "1"]
    other = subprocess.Popen(command, env={**os.environ})
    try:
        with run_server(*options, model=str(tmp_path / "tiny")) as server:
            yield server
    finally:
        other.send_signal(signal.SIGTERM)
        assert other.wait(20) == 0


@pytest.mark.timeout(120)
def test_two_machines_serve_together(server: Server) -> None:
    assert len(server.post("/v1/completions", **ASK)["choices"][0]["text"]) > 0
    assert "rank 1" in server.children() and "rank 2" not in server.children()
    server.wait_for(lambda: server.http.get("/metrics").text.count("firstlight:rank_steps_total{") == 4, 10, "a report")
