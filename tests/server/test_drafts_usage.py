"""What a response says about drafts, and text that comes several tokens at a time."""

import pytest

from server.generation import GenerationRequest
from server.wire import Event
from tests.server.exchange import chat, complete
from tests.server.fakes import EOS, FakeEngine, Script, ids_of, make_app


def drafted(*events: tuple[str, int]) -> Script:
    """(Text, drafts of the step) of each event; then the end."""

    def script(request: GenerationRequest, choice: int) -> list[Event | Exception]:
        texts: list[Event | Exception] = [Event(0, ids_of(text), num_drafts=drafts) for text, drafts in events]
        return [*texts, Event(0, [EOS], finish_reason="stop")]

    return script


STEPS = drafted(("a", 0), ("bcd", 4), ("e", 3), ("fg", 1))


def test_usage_has_accepted_and_rejected_drafts() -> None:
    app = make_app(FakeEngine(script=STEPS))
    details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 5}
    answer = chat(app)
    assert answer.json["choices"][0]["message"]["content"] == "abcdefg"
    assert answer.json["usage"]["completion_tokens"] == 8
    assert answer.json["usage"]["completion_tokens_details"] == details
    both = complete(app, n=2).json["usage"]["completion_tokens_details"]
    assert both == {name: 2 * count for name, count in details.items()}
    streamed = chat(app, stream=True, stream_options={"include_usage": True}).events[-1]
    assert streamed["usage"]["completion_tokens_details"] == details


def test_usage_says_nothing_about_drafts_where_there_were_none() -> None:
    assert "completion_tokens_details" not in chat(make_app(FakeEngine())).json["usage"]


@pytest.mark.parametrize(
    ("stop", "text", "tokens", "accepted"), [("d", "abc", 4, 2), ("c", "ab", 3, 2), ("b", "a", 2, 1)]
)
def test_stop_string_within_a_step_ends_there(stop: str, text: str, tokens: int, accepted: int) -> None:
    """Tokens behind the one that completes it are neither text nor usage."""
    usage = chat(make_app(FakeEngine(script=STEPS)), stop=stop)
    assert usage.json["choices"][0]["message"]["content"] == text
    assert usage.json["usage"]["completion_tokens"] == tokens
    assert usage.json["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == accepted
