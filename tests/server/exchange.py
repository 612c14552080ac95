"""A hand-driven ASGI client and what came back, for tests of the gateway."""

import asyncio
import json
from collections.abc import Coroutine, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI

from tests.server.fakes import MODEL

T = TypeVar("T")


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; its shape is checked."""
        assert self.headers["content-type"] == "application/json"
        error = self.json["error"]
        assert {"message", "type", "param", "code"} <= error.keys()
        assert isinstance(error["message"], str)
        assert 0 < len(error["message"]) < 310
        return dict(error)

    @property
    def events(self) -> list[Any]:
        """The parsed chunks of a stream; it must be well framed and end with [DONE]."""
        assert self.complete
        parts = self.body.split(b"\n\n")
        assert parts.pop() == b""
        assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
        assert parts.pop() == b"data: [DONE]"
        return [json.loads(part[6:]) for part in parts]

    @property
    def named_events(self) -> list[Any]:
        """The parsed events of a stream in which each is named as its document's type; it must be well framed."""
        assert self.complete
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        events = []
        for part in parts:
            name, data = part.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events


class Exchange:
    """One request, driven by hand: body in parts, a client that leaves, a client that stops reading."""

    def __init__(self, app: FastAPI, method: str, path: str, *, spec_version: str = "2.3") -> None:
        self.app, self.answer = app, Answer()
        self.inbox: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.wrote = asyncio.Event()
        self.gone = False
        self.spec_version = spec_version
        self.scope: MutableMapping[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [],
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
        }

    def header(self, name: str, value: str) -> None:
        self.scope["headers"].append((name.lower().encode(), value.encode()))

    def give(self, body: bytes, *, more: bool = False) -> None:
        self.inbox.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        """The client closes its connection."""
        self.gone = True
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self.may_write.wait()
        if self.gone:
            if self.spec_version >= "2.4":
                raise OSError("the client is gone")
            return
        if message["type"] == "http.response.start":
            assert self.answer.status == 0
            self.answer.status = message["status"]
            self.answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.answer.body += message.get("body", b"")
            self.answer.complete = not message.get("more_body", False)
        self.wrote.set()

    async def run(self) -> Answer:
        await asyncio.wait_for(self.app(self.scope, self.inbox.get, self._send), 30)
        return self.answer


async def call(
    app: FastAPI, method: str, path: str, body: object = None, *, headers: dict[str, str] | None = None
) -> Answer:
    """One whole request. `body` is sent as JSON, or as it is when it is bytes."""
    exchange = Exchange(app, method, path)
    given = {"content-type": "application/json"} if body is not None else {}
    for name, value in (given | (headers or {})).items():
        exchange.header(name, value)
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    exchange.give(raw)
    return await exchange.run()


def run(work: Coroutine[Any, Any, T]) -> T:
    """In a fresh event loop."""
    return asyncio.run(asyncio.wait_for(work, 60))


def chat(app: FastAPI, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    """POST /v1/chat/completions with a short conversation, changed by `fields`."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | fields
    return run(call(app, "POST", "/v1/chat/completions", body, headers=headers))


def complete(app: FastAPI, **fields: Any) -> Answer:
    """POST /v1/completions with a short prompt, changed by `fields`."""
    return run(call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": "hi"} | fields))


def texts_of(events: list[Any]) -> dict[int, str]:
    """Concatenated text by choice of a chat or completions stream."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


def finishes_of(events: list[Any]) -> dict[int, list[str]]:
    """Finish reasons by choice of a stream."""
    found: dict[int, list[str]] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["finish_reason"] is not None:
                found.setdefault(choice["index"], []).append(choice["finish_reason"])
    return found
