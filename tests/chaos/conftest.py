"""Ports, and what the tests of faults ask a server."""

import socket

import pytest


@pytest.fixture(scope="session")
def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
