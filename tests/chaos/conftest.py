"""A port for the tests of faults."""

import pytest

from tests import ports


@pytest.fixture(scope="session")
def free_port() -> int:
    return ports.free_port()
