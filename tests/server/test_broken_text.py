"""Outputs that are no clean text: bytes that are not UTF-8, line ends only Unicode knows, stop strings too early."""

import codecs

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.generation import GenerationRequest
from server.wire import Event, Logprob
from tests.server.exchange import chat, complete, texts_of
from tests.server.fakes import TOKENIZER, FakeEngine, Script, make_app, says

BYTE_IDS = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(TOKENIZER.vocab_size)}
PARTS = st.sampled_from([b"a", b"b", b"c", b"\xff", b"\x82", b"\xe2\x82", "é".encode(), "👩".encode()])


def spells(data: bytes) -> Script:
    """One token for each byte, until the length ends it."""

    def script(request: GenerationRequest, choice: int) -> list[Event | Exception]:
        ids = [BYTE_IDS[bytes([byte])] for byte in data]
        wanted = request.sampling.logprobs >= 0
        events = [Event(0, [token_id], [Logprob(-1.0)] if wanted else []) for token_id in ids]
        return [*events, Event(0, finish_reason="length")]

    return script


@pytest.mark.parametrize(
    ("data", "stop", "shown"),
    [
        (b"\xffabcd", "bc", b"\xffa"),
        (b"\xe2\x82abcd", "abcd", b"\xe2\x82"),
        (b"\xe2\x82abx", "abcd", b"\xe2\x82abx"),
        (b"\x80\x80\x80stop", "stop", b"\x80\x80\x80"),
    ],
)
def test_logprobs_show_nothing_of_a_stop_string_after_broken_bytes(data: bytes, stop: str, shown: bytes) -> None:
    answer = chat(make_app(FakeEngine(script=spells(data))), stop=stop, logprobs=True)
    choice = answer.json["choices"][0]
    assert choice["message"]["content"] == shown.decode("utf-8", "replace")
    assert b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]) == shown


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(PARTS, max_size=10), stop=st.lists(st.text("abcé", min_size=1, max_size=3), max_size=2))
def test_offsets_and_bytes_follow_the_text_whatever_the_bytes(parts: list[bytes], stop: list[str]) -> None:
    data = b"".join(parts)
    options = {"logprobs": 0, "max_tokens": 99, **({"stop": stop} if stop else {})}
    choice = complete(make_app(FakeEngine(script=spells(data)), access_log=False), **options).json["choices"][0]
    found, shown = choice["logprobs"], b""
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset : offset + len(token)] == token
        shown += bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
    assert data.startswith(shown)
    whole_characters = codecs.getincrementaldecoder("utf-8")("replace").decode(shown)
    assert whole_characters == choice["text"]


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_text_until_min_tokens(include: bool) -> None:
    """As end tokens are: one that is complete with token min_tokens or before ends nothing."""
    app = make_app(FakeEngine(script=says("xabcabcabc")))
    options = {"stop": ["bc"], "include_stop_str_in_output": include, "return_token_ids": True, "max_tokens": 50}
    for min_tokens, text in ((0, "xabc"), (3, "xabc"), (4, "xabcabc"), (7, "xabcabcabc"), (10, "xabcabcabc")):
        answer = chat(app, min_tokens=min_tokens, **options).json
        choice, stopped = answer["choices"][0], min_tokens < 10
        shown = text if include or not stopped else text.removesuffix("bc")
        assert (choice["message"]["content"], choice["stop_reason"]) == (shown, "bc" if stopped else None)
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(text) + (not stopped)
        assert texts_of(chat(app, min_tokens=min_tokens, stream=True, **options).events) == {0: shown}


def test_an_event_is_one_line_by_everybodys_rules() -> None:
    """httpx's `iter_lines` and Python's `splitlines` end a line at these characters too."""
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\r\n"
    for post in (chat, complete):
        answer = post(make_app(FakeEngine(script=says(text, per_event=40))), stream=True, max_tokens=99)
        assert texts_of(answer.events) == {0: text}
        assert all(line.startswith("data: ") for line in answer.body.decode().splitlines() if line)
