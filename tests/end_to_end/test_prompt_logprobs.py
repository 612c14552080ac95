"""Log-probabilities of prompts, of a real model: those of echo, whatever the prefix cache holds."""

import math
from typing import Any

import pytest

from tests.end_to_end.conftest import Server

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

TEXT = "The capital of France is Paris. The capital of Italy is Rome."


def test_of_completions(server: Server) -> None:
    asked: dict[str, Any] = {"prompt": TEXT, "max_tokens": 1, "temperature": 0}
    first = server.post("/v1/completions", prompt_logprobs=2, logprobs=2, echo=True, **asked)
    (choice,) = first["choices"]
    entries = choice["prompt_logprobs"]
    assert entries[0] is None
    echoed = choice["logprobs"]
    assert len(entries) == first["usage"]["prompt_tokens"]
    for entry, value, token in zip(entries[1:], echoed["token_logprobs"][1:], echoed["tokens"][1:], strict=False):
        own = next(iter(entry.values()))
        assert (own["logprob"], own["decoded_token"]) == (value, token)
        ranked = sorted(entry.values(), key=lambda found: found["rank"])
        assert [found["rank"] for found in ranked[:2]] == [1, 2]
        assert all(math.isfinite(found["logprob"]) for found in ranked)
        assert [found["logprob"] for found in ranked] == sorted((found["logprob"] for found in ranked), reverse=True)
    again = server.post("/v1/completions", prompt_logprobs=2, **asked)
    assert again["choices"][0]["prompt_logprobs"] == entries
    rome = next(entry for entry in reversed(entries) if next(iter(entry.values()))["decoded_token"] == " Rome")
    assert next(iter(rome.values()))["rank"] == 1


def test_of_chat(server: Server) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = server.post("/v1/chat/completions", messages=messages, prompt_logprobs=0, max_tokens=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] == 37
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])
