"""A server with a tiny vision model, for the tests of a file."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from server.tiny_vlm import write_tiny_vlm
from tests.end_to_end.conftest import Server, run_server


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tiny-vlm")
    write_tiny_vlm(folder)
    with run_server(model=str(folder)) as running:
        yield running


@pytest.fixture
def client(eyes: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=eyes.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
