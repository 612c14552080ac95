"""Requests to Anthropic's Messages API over the scripted engine, and what came back."""

from typing import Any

from fastapi import FastAPI

from tests.server.exchange import Answer, call, run
from tests.server.fakes import MODEL, TOKENIZER, FakeEngine

PATH = "/v1/messages"


def send(app: FastAPI, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    """POST /v1/messages"""
    body = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]} | fields
    return run(call(app, "POST", PATH, body, headers=headers))


def error_of(answer: Answer) -> tuple[int, str, str]:
    """(status, type, message); the shape is checked."""
    document = answer.json
    assert (document["type"], document["request_id"]) == ("error", answer.headers["request-id"])
    return answer.status, document["error"]["type"], document["error"]["message"]


def prompt_of(engine: FakeEngine) -> str:
    """Of the newest request."""
    text = TOKENIZER.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)
    return text.replace("<|im_start|>", "").replace("<|im_end|>\n", "|")
