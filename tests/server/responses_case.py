"""Requests to the Responses API over the scripted engine, and what came back."""

from typing import Any

from fastapi import FastAPI

from tests.server.exchange import Answer, call, run
from tests.server.fakes import MODEL, TOKENIZER, FakeEngine

PATH = "/v1/responses"


def respond(app: FastAPI, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    """POST /v1/responses"""
    return run(call(app, "POST", PATH, {"model": MODEL, "input": "hi"} | fields, headers=headers))


def get(app: FastAPI, path: str, headers: dict[str, str] | None = None) -> Answer:
    return run(call(app, "GET", f"{PATH}/{path}", headers=headers))


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """Each checked: named as its data say, numbered from 0."""
    events = answer.named_events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """Types without their prefix, each run of equal ones once."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]


def prompt_of(engine: FakeEngine) -> str:
    """Of the newest request."""
    return TOKENIZER.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)
