"""What the streams ask that engines are killed under, and what they heard: 16 choices of every kind of request."""

from dataclasses import dataclass, field
from typing import Any

from tests.end_to_end.conftest import Server, sse_events
from tests.end_to_end.showing import picture, shows
from tests.end_to_end.test_conversation import CHAT, COMPLETIONS

Request = tuple[str, dict[str, Any]]
"""Path and body."""

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def _asks(messages: Any, max_tokens: int, **more: object) -> Request:
    return CHAT, {"messages": messages, "max_tokens": max_tokens, "stream_options": {"include_usage": True}, **more}


def _says(text: str) -> Any:
    return [{"role": "user", "content": text}]


def text_requests(max_tokens: int) -> list[Request]:
    """12 requests with 16 choices: greedy, seeded, n = 2, penalties, log-probabilities, grammars, stop strings."""
    found: list[Request] = []
    for index in range(4):
        question = _says(f"Tell me a story about {index + 2} bears.")
        found += [
            _asks(question, max_tokens, temperature=0, ignore_eos=True),
            _asks(question, max_tokens, seed=index, n=2, frequency_penalty=0.4, logprobs=True),
        ]
    for index in range(2):
        found.append(_asks(_says("Who are you? Answer as JSON."), max_tokens, seed=index, response_format=FORM))
        body = {"prompt": "one two three " * 8, "seed": index, "min_tokens": 20, "stop": ["seven"]}
        found.append((COMPLETIONS, body | {"max_tokens": max_tokens, "stream_options": {"include_usage": True}}))
    return found


def image_requests(max_tokens: int) -> list[Request]:
    """As many about pictures, which some of them share, and two about none."""
    found: list[Request] = []
    for index in range(4):
        question = shows("Compare ", picture(index), " with ", picture(index + 1), ".")
        found += [
            _asks(shows("What is ", picture(index), "?"), max_tokens, temperature=0, ignore_eos=True),
            _asks(question, max_tokens, seed=index, n=2, frequency_penalty=0.4, logprobs=True, ignore_eos=True),
        ]
    for index in range(2):
        found.append(_asks(shows(picture(index), "Describe."), max_tokens, seed=index, response_format=FORM))
        found.append(_asks(_says("one two three " * 8), max_tokens, seed=index, ignore_eos=True))
    return found


@dataclass
class Heard:
    """What a stream said."""

    choices: dict[int, list[Any]] = field(default_factory=dict)
    """Texts, log-probabilities and ends of each choice, in order."""
    completion_tokens: int = 0
    error: str = ""


def listen(server: Server, request: Request, on_event: Any, timeout: float) -> Heard:
    """Stream a request to its end; `on_event` is called for each event."""
    path, body = request
    heard = Heard()
    with server.http.stream("POST", path, json={"model": server.model, "stream": True, **body}, timeout=timeout) as all:
        if all.status_code != 200:
            return Heard(error=all.read().decode())
        for event in sse_events(all.iter_lines()):
            on_event()
            _add(heard, event)
    return heard


def _add(heard: Heard, event: dict[str, Any]) -> None:
    if "error" in event:
        heard.error = str(event["error"])
    for choice in event.get("choices", ()):
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content", ())]
        said = heard.choices.setdefault(choice["index"], ["", [], []])
        said[0] += text
        said[1] += logprobs
        said[2] += [choice["finish_reason"]] if choice["finish_reason"] else []
    heard.completion_tokens = (event.get("usage") or {}).get("completion_tokens", 0)
