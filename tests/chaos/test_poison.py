"""Requests that crash, hang or stop the engine: they fail alone; their neighbours finish with the right text."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.chaos.mix import text_requests
from tests.end_to_end.conftest import Server, run_server
from tests.end_to_end.test_conversation import COMPLETIONS

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


def answer(server: Server, path: str, body: dict[str, Any]) -> Any:
    body = {key: value for key, value in body.items() if key != "stream_options"}
    return server.post(path, **body)["choices"]


def test_poison_fails_alone() -> None:
    """Within three restarts, by a crash and then by a hang; after that it is refused at the door."""
    with run_server("--fault-hooks", "--stall-timeout", "3", "--step-timeout", "3") as server:
        neighbours = text_requests(40)
        undisturbed = [answer(server, path, body) for path, body in neighbours]
        for number, fault in enumerate(("crash", "hang"), 1):
            poison = {"model": server.model, "prompt": f"{fault} " * 9, "cache_salt": f"fault:{fault}", "max_tokens": 9}
            with ThreadPoolExecutor(len(neighbours) + 1) as pool:
                beside = [pool.submit(answer, server, path, body) for path, body in neighbours]
                failed = pool.submit(server.http.post, COMPLETIONS, json=poison).result()
                assert [future.result() for future in beside] == undisturbed
            assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
            refused = server.http.post(COMPLETIONS, json=poison)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "request_quarantined")
            metrics = server.metrics()
            assert metrics["engine_restarts_total"] == 3 * number
            assert metrics["recovery_quarantines_total"] == number
