"""A machine on which memory is scarce all the time, though not short: all is as ever, but nothing is kept for speed."""

import time
from typing import Any

import pytest

from model_runtime.host import available_memory
from server.supervisor import SPARE_SECONDS
from tests.chaos.kills import chaos_server
from tests.end_to_end.conftest import Server
from tests.end_to_end.showing import picture, shows
from tests.end_to_end.test_conversation import CHAT

pytestmark = pytest.mark.timeout(300)


def ask(server: Server) -> Any:
    return server.post(CHAT, messages=shows(picture(1), "What?"), max_tokens=300, temperature=0, ignore_eos=True)[
        "choices"
    ]


def test_scarce_memory() -> None:
    enough = str(available_memory() * 2 // 3)  # other tests may take a third, or give as much back
    with chaos_server(images=True, arguments=("--min-free-memory", enough)) as server:
        first = ask(server)
        stored = server.post("/v1/responses", input="Hi", max_output_tokens=1, temperature=0)["id"]
        gone = lambda: server.http.get(f"/v1/responses/{stored}").status_code == 404  # noqa: E731
        server.wait_for(gone, 10, "no stored response")
        server.wait_for(lambda: server.progress()["cached_blocks"] == 0, 10, "an empty prefix cache")
        assert ask(server) == first
        images = server.metrics()["images_encoded_total"]
        assert (images, server.metrics()["encoder_cache_hits_total"]) == (2, 0)
        server.children()["engine"].kill()
        assert ask(server) == first
        server.wait_for(lambda: server.progress().get("generation") == 1, 30, "a new engine")
        time.sleep(SPARE_SECONDS + 1)
        assert "spare engine" not in server.children()
