"""Equal beginnings of prompts are computed once, and never shared between tenants."""

import uuid

import httpx
import pytest

from tests.end_to_end.conftest import Server

pytestmark = pytest.mark.model

PROMPT_TOKENS = 400
BODY = {"max_tokens": 1, "temperature": 0}


def prompt(first: int) -> list[int]:
    """400 token ids that no other test uses, beginning with `first`."""
    return [first, *(1000 + 37 * position for position in range(PROMPT_TOKENS - 1))]


def test_chat_history_is_cached(server: Server) -> None:
    messages = [{"role": "user", "content": f"{uuid.uuid4()} " + "The weather is fine today. " * 60}]
    body = {"messages": messages, **BODY}
    first, second = (server.post("/v1/chat/completions", **body)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] < 48
    assert second["prompt_tokens_details"]["cached_tokens"] > second["prompt_tokens"] - 17


def test_tenants_with_different_salts_share_nothing(server: Server) -> None:
    def cached(salt: str | None) -> int:
        usage = server.post("/v1/completions", prompt=prompt(2001)[:100], cache_salt=salt, **BODY)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("one"), cached("two"), cached(None)] == [0, 0, 0]
    assert [cached("one"), cached("two"), cached(None)] == [96, 96, 96]


def test_hits_are_counted(server: Server) -> None:
    before = server.metrics()
    ids = prompt(2002)[:64]
    for _ in range(2):
        server.post("/v1/completions", prompt=ids, **BODY)
    after = server.metrics()
    assert after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"] == 2 * len(ids)
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == 48
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 2 * len(ids)


def test_salt_is_checked(server: Server) -> None:
    body = {"model": server.model, "prompt": "Once", "cache_salt": "", **BODY}
    refused = httpx.post(server.url + "/v1/completions", json=body, timeout=30)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
