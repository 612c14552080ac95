"""Reading streams, however they are cut."""

import json

import pytest

from loadtest.record import Record
from loadtest.sse import CompletionReader, SseReader

CHUNKS = (
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None},
    {"choices": [{"index": 0, "delta": {"content": "Grüße"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": None}},
)


def body(*chunks: object) -> bytes:
    return b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"


def read(data: bytes, status: int = 200) -> tuple[Record, str]:
    record = Record(scheduled=0.0)
    reader = CompletionReader(record)
    for index in range(len(data)):
        reader.on_piece(float(index), data[index : index + 1])
    reader.finish(status)
    return record, "".join(reader.text)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_come_out_the_same_however_they_are_cut(size: int) -> None:
    data = b": hello\r\n\r\ndata: one\r\n\r\nevent: x\ndata:two\ndata: three\n\n\n\ndata: four\n\ndata: five"
    reader = SseReader()
    events = [event for start in range(0, len(data), size) for event in reader.feed(data[start : start + size])]
    assert events == [b"one", b"two\nthree", b"four"]


def test_times_are_those_of_chunks_with_text() -> None:
    data = body(*CHUNKS)
    ends = [index + 1 for index in range(len(data)) if data[index : index + 2] == b"\n\n"]
    record, text = read(data)
    assert record.error == ""
    assert record.content_times == ends[1:4], "a role or a finish reason is no text; reasoning and tool calls are"
    assert record.end == ends[4], "usage and [DONE] come after the end"
    assert (record.has_usage, record.input_tokens, record.output_tokens, record.cached_tokens) == (True, 7, 4, 0)
    assert text == "Grüße"


def test_completions_have_their_text_elsewhere() -> None:
    record, text = read(body({"choices": [{"text": "a"}]}, {"choices": [{"text": "b", "finish_reason": "length"}]}))
    assert (text, len(record.content_times), record.error) == ("ab", 2, "")
    assert record.end == record.content_times[1]


@pytest.mark.parametrize(
    ("data", "status", "kind", "detail"),
    [
        (body(CHUNKS[1])[:-14], 200, "broken stream", "without [DONE]"),
        (body(CHUNKS[1], {"error": {"message": "gone"}}), 200, "error in stream", "gone"),
        (b"data: {{\n\n" + body(CHUNKS[1]), 200, "not a chunk", "{{"),
        (body(), 200, "empty answer", "neither text"),
        (b'{"error": {"message": "slow down"}}', 429, "HTTP 429", "slow down"),
        (b'{"object": "error", "message": "flat"}', 400, "HTTP 400", "flat"),
        (b'{"error": "a word"}', 401, "HTTP 401", "a word"),
        (b"<html>" + b"x" * 1000, 502, "HTTP 502", "<html>x"),
        (b"[1]", 500, "HTTP 500", "[1]"),
        (b"\xff", 500, "HTTP 500", "�"),
    ],
)
def test_failures_are_named(data: bytes, status: int, kind: str, detail: str) -> None:
    record, _ = read(data, status)
    assert record.error == kind
    assert detail in record.detail and len(record.detail) <= 300
