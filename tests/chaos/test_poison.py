"""Requests that crash the engine or hang it: they fail alone; their neighbours finish with the right text."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.chaos.kills import chaos_server
from tests.chaos.mix import image_requests
from tests.end_to_end.conftest import Server
from tests.end_to_end.test_conversation import COMPLETIONS

pytestmark = pytest.mark.timeout(300)


def answer(server: Server, path: str, body: dict[str, Any]) -> Any:
    body = {key: value for key, value in body.items() if key != "stream_options"}
    return server.post(path, **body)["choices"]


def test_poison_fails_alone() -> None:
    """Within three restarts; after that it is refused at the door."""
    with chaos_server(images=True, arguments=("--fault-hooks", "--step-timeout", "2")) as server:
        neighbours = image_requests(120)
        with ThreadPoolExecutor(len(neighbours) + 1) as pool:
            undisturbed = list(pool.map(lambda request: answer(server, *request), neighbours))
            for number, fault in enumerate(("crash@commit", "hang@execute"), 1):
                poison = {"prompt": fault, "cache_salt": f"fault:{fault}", "max_tokens": 9, "model": server.model}
                beside = [pool.submit(answer, server, path, body) for path, body in neighbours]
                failed = pool.submit(server.http.post, COMPLETIONS, json=poison).result()
                assert [future.result() for future in beside] == undisturbed
                assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
                refused = server.http.post(COMPLETIONS, json=poison)
                assert (refused.status_code, refused.json()["error"]["code"]) == (400, "request_quarantined")
                metrics = server.metrics()
                assert metrics["engine_restarts_total"] == 3 * number
                assert metrics["recovery_quarantines_total"] == number
