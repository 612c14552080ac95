"""Sixteen users at once get their answers in far less time than one after another."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.end_to_end.conftest import Server

pytestmark = pytest.mark.model

USERS = 16
MAX_SHARE = 0.40
ROUNDS = 3


def chat(server: Server, user: int, salt: str, tokens: int = 48) -> None:
    """An answer of a fixed length; not even the beginning of the prompt is another user's."""
    answer = server.post(
        "/v1/chat/completions",
        messages=[
            {"role": "system", "content": f"{user} is your number."},
            {"role": "user", "content": "Tell me a story about it."},
        ],
        max_tokens=tokens,
        ignore_eos=True,
        cache_salt=f"{salt} {user}",
    )
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def share(server: Server, salt: str) -> float:
    """The time of all chats together as a share of that of one after another."""
    start = time.monotonic()
    with ThreadPoolExecutor(USERS) as pool:
        list(pool.map(lambda user: chat(server, user, f"{salt} together"), range(USERS)))
    together = time.monotonic() - start
    start = time.monotonic()
    for user in range(USERS):
        chat(server, user, f"{salt} apart")
    return together / (time.monotonic() - start)


def test_concurrent_chats_share_the_machine(server: Server) -> None:
    """In one of a few rounds, since the machine is shared with others."""
    with ThreadPoolExecutor(USERS) as pool:
        list(pool.map(lambda user: chat(server, user, "warm-up", 2), range(USERS)))
    shares: list[float] = []
    while len(shares) < ROUNDS and min(shares, default=1.0) >= MAX_SHARE:
        shares.append(share(server, f"round {len(shares)}"))
    assert min(shares) < MAX_SHARE, f"shares of the time one after another: {shares}"
