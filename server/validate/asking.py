"""Requests to the server under validation, and what an answer is made of. Used by the stages; httpx, any thread."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Body = dict[str, Any]


class Refused(Exception):
    """The server answered with an error, or the answer has not the form that it must have."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a completion came to."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the tokens that are text."""
    best: tuple[float, ...]
    """The largest log-probability of each of those places."""
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int
    image_tokens: int = 0
    prompt_logprobs: tuple[dict[str, dict[str, Any]], ...] = ()
    """Of the prompt's tokens but the first."""


def complete(http: httpx.Client, body: Body) -> Answer:
    """A whole answer of /v1/completions. Raises Refused, httpx.HTTPError."""
    found = post(http, COMPLETIONS, {"return_token_ids": True, "logprobs": 1, **body})
    with _form():
        choice, usage = found["choices"][0], found["usage"]
        scored = tuple(entry for entry in choice.get("prompt_logprobs") or () if entry is not None)
        return _answer([choice], usage, scored)


def stream(http: httpx.Client, body: Body) -> Answer:
    """The same as a stream. Raises Refused, httpx.HTTPError."""
    asked = {"return_token_ids": True, "logprobs": 1, "stream": True, "stream_options": {"include_usage": True}, **body}
    choices: list[Body] = []
    usage: Body = {}
    with http.stream("POST", COMPLETIONS, json=asked) as response:
        if response.status_code != httpx.codes.OK:
            raise Refused(response.read().decode("utf-8", "replace")[:500], response.status_code)
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            with _form():
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise Refused(str(event["error"])[:500])
                choices += event["choices"]
                usage = event["usage"] or usage
    if not choices or not usage:
        raise Refused("the stream ended without an answer or without usage")
    with _form():
        return _answer(choices, usage, ())


@contextlib.contextmanager
def _form() -> Iterator[None]:
    """What is not there, or is something else, is the server's fault."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Refused(f"an answer has not the form that it must have: {type(error).__name__} {error}") from None


def _answer(parts: Sequence[Body], usage: Body, scored: tuple[Body, ...]) -> Answer:
    """Put together of one choice, or of the choices of a stream's events."""
    logprobs = [part["logprobs"] for part in parts if part.get("logprobs")]
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        text="".join(part["text"] for part in parts),
        token_ids=tuple(token for part in parts for token in part.get("token_ids") or ()),
        logprobs=tuple(value for one in logprobs for value in one["token_logprobs"]),
        best=tuple(max(top.values()) for one in logprobs for top in one["top_logprobs"]),
        finish_reason=str(parts[-1]["finish_reason"]),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        cached_tokens=details.get("cached_tokens", 0),
        image_tokens=details.get("image_tokens", 0),
        prompt_logprobs=scored,
    )


def chat(http: httpx.Client, body: Body) -> Body:
    """The document of a chat answer. Raises Refused, httpx.HTTPError."""
    return post(http, CHAT, body)


def post(http: httpx.Client, path: str, body: Body) -> Body:
    """A JSON answer. Raises Refused with the server's own words, httpx.HTTPError."""
    response = http.post(path, json=body)
    if response.status_code != httpx.codes.OK:
        raise Refused(response.text[:500], response.status_code)
    found: Body = response.json()
    return found


def complete_all(http: httpx.Client, bodies: Sequence[Body]) -> list[Answer]:
    """All at the same time. Raises what `complete` raises."""
    with ThreadPoolExecutor(max(1, len(bodies))) as pool:
        return list(pool.map(lambda body: complete(http, body), bodies))


def difference(before: Answer, after: Answer, tolerance: float) -> str:
    """In what two answers differ that should be the same; '' for nothing. With a tolerance, log-probabilities may
    differ by that much, and a text may go another way where two tokens were that close."""
    if before.token_ids != after.token_ids:
        pairs = enumerate(zip(before.token_ids, after.token_ids, strict=False))
        place = next((place for place, (one, other) in pairs if one != other), -1)
        if place < 0:
            return f"{len(after.token_ids)} output tokens, not {len(before.token_ids)}"
        gaps = [abs(one - other) for one, other in zip(before.logprobs, after.logprobs, strict=False)][: place + 1]
        if tolerance and max(gaps, default=0.0) <= tolerance:
            return ""
        return f"output token {place} is {after.token_ids[place]}, not {before.token_ids[place]}"
    for place, (one, other) in enumerate(zip(before.logprobs, after.logprobs, strict=True)):
        if not abs(one - other) <= tolerance:
            return f"the log-probability of output token {place} is {other:.6f}, not {one:.6f}"
    if before.text != after.text:
        return f"the text is {after.text!r}, not {before.text!r}"
    if before.finish_reason != after.finish_reason:
        return f"it ended with {after.finish_reason}, not with {before.finish_reason}"
    return ""
