"""Conversations with the real model: what it answers, and that every way of asking brings the same answer."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.end_to_end.conftest import Server

pytestmark = pytest.mark.model

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def texts(chunks: list[dict[str, Any]], key: str = "content") -> dict[int, str]:
    """The text of each choice of a stream; `key` is 'content' for chat, 'text' for completions."""
    found: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        part = choice["text"] if key == "text" else choice["delta"].get("content", "")
        found[choice["index"]] = found.get(choice["index"], "") + part
    return found


def finishes(chunks: list[dict[str, Any]]) -> dict[int, list[str]]:
    """The finish reasons of each choice of a stream."""
    found: dict[int, list[str]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found.setdefault(choice["index"], [])
        if choice["finish_reason"] is not None:
            found[choice["index"]].append(choice["finish_reason"])
    return found


def test_capital_of_france(server: Server) -> None:
    answer = server.post(CHAT, messages=QUESTION, temperature=0)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (37, 8, 45)


def test_capital_of_france_streamed(server: Server) -> None:
    *chunks, usage = server.stream(CHAT, messages=QUESTION, temperature=0, stream_options={"include_usage": True})
    assert [choice["delta"] for choice in chunks[0]["choices"]] == [{"role": "assistant", "content": ""}]
    assert texts(chunks) == {0: ANSWER}
    assert finishes(chunks) == {0: ["stop"]}
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (37, 8)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in [*chunks, usage]}) == 1


def test_conversation_goes_on(server: Server) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And of Italy?"}]
    answer = server.post(CHAT, messages=messages, temperature=0, max_tokens=16)
    assert "Rome" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_seeded_sample_is_the_same_streamed_and_not(server: Server) -> None:
    body = {"messages": QUESTION, "temperature": 1.2, "seed": 11, "max_tokens": 12, "n": 2, "ignore_eos": True}
    whole = server.post(CHAT, **body)
    assert texts(server.stream(CHAT, **body)) == {
        choice["index"]: choice["message"]["content"] for choice in whole["choices"]
    }


def test_eight_concurrent_are_as_alone_in_any_order(server: Server) -> None:
    """X08: neighbours and their order change nothing, with greedy and with seeded sampling."""
    bodies = [
        {
            "prompt": f"{word} was",
            "max_tokens": 10,
            "temperature": index % 2 * 1.0,
            "seed": index,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for index, word in enumerate(("Ada", "Blaise", "Carl", "David", "Emmy", "Felix", "Georg", "Henri"))
    ]

    def ask(body: dict[str, Any]) -> list[int]:
        return server.post(COMPLETIONS, **body)["choices"][0]["token_ids"]  # type: ignore[no-any-return]

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(ask, bodies)) == alone
        assert list(pool.map(ask, reversed(bodies))) == alone[::-1]
