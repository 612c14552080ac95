"""A prompt that was computed before gives its first token much sooner."""

import time

import pytest

from tests.end_to_end.conftest import Server, sse_events
from tests.end_to_end.test_prefix_cache import BODY, prompt

pytestmark = pytest.mark.model

MIN_CACHED = 384
MAX_SHARE = 0.40


def first_token(server: Server, ids: list[int]) -> tuple[float, int]:
    """(seconds to the first token, cached tokens)"""
    body = {"model": server.model, "prompt": ids, "stream": True, "stream_options": {"include_usage": True}, **BODY}
    start = time.monotonic()
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        events = sse_events(response.iter_lines())
        next(events)
        seconds = time.monotonic() - start
        *_, usage, _ = list(events)
    return seconds, usage["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_second_of_two_identical_prompts_is_fast(server: Server) -> None:
    first_token(server, [5, 6, 7])
    cold, none = first_token(server, prompt(2000))
    warm, cached = first_token(server, prompt(2000))
    assert (none, cached >= MIN_CACHED) == (0, True)
    assert warm < MAX_SHARE * cold, f"{warm:.3f} s with the cache, {cold:.3f} s without"
