"""Random combinations of all parameters of all APIs: no 5xx, nothing left behind, and streams say what documents say.

`COMBINATIONS=2000` in the environment makes it that many requests, drawn anew each time.
"""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.end_to_end.combinations import Body, requests
from tests.end_to_end.conftest import Server, run_server, sse_events
from tests.end_to_end.joining import joined, whole
from tests.end_to_end.neighbour import Neighbour

CHUNKS = ("/v1/chat/completions", "/v1/completions")
MANY = int(os.environ.get("COMBINATIONS", "0"))

pytestmark = [pytest.mark.model, pytest.mark.timeout(120 + MANY * 3)]

combined = settings(
    max_examples=MANY or 40,
    deadline=None,
    derandomize=not MANY,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def guessing() -> Iterator[Server]:
    """A server that guesses tokens ahead, with a neighbour whose answers must not change meanwhile."""
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    with run_server("--speculative-config", drafts, "--max-num-seqs", "8") as running:
        yield running


def _events(response: httpx.Response) -> list[dict[str, Any]]:
    """Without a final [DONE]."""
    return [event for event in sse_events(iter(response.text.split("\n"))) if event != {"done": True}]


def test_combinations(guessing: Server) -> None:
    statuses: Counter[int] = Counter()

    @combined
    @given(request=requests)
    def check(request: tuple[str, Body]) -> None:
        path, body = request
        body = {"model": guessing.model, **body}
        plain = guessing.http.post(path, json=body)
        streamed = guessing.http.post(path, json=_streamed(path, body))
        statuses[plain.status_code] += 1
        assert plain.status_code == streamed.status_code, (plain.text, streamed.text, body)
        assert plain.status_code in (200, 400), (plain.text, body)
        if plain.status_code == 200:
            assert joined(path, _events(streamed)) == whole(path, plain.json()), body
        else:
            assert _error(plain) == _error(streamed)

    with Neighbour(guessing):
        check()
    assert statuses[200] > 2 * statuses[400], statuses
    guessing.wait_for(guessing.is_idle, 10, "idleness")


def _streamed(path: str, body: Body) -> Body:
    """The same request, as a stream."""
    usage = {"stream_options": {"include_usage": True}} if path in CHUNKS else {}
    return {**body, "prompt_logprobs": None, "stream": True} | usage


def _error(response: httpx.Response) -> Any:
    return {key: value for key, value in response.json().items() if key != "request_id"}
