"""A server with OpenAI's routes that answers on exact times and notes what it did, so that a client can be held against
the truth. `python -m tests.loadtest.fake_server` runs one to hold other tools against, too."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

OVERHEAD = 10
"""Tokens of the chat template; every word is one more."""
TOKEN = 'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"fake","choices":[%s]}\n\n'


@dataclass
class Served:
    """One request as the server saw it; times of `time.perf_counter`."""

    path: str
    body: dict[str, Any]
    received: float
    sent: list[float] = field(default_factory=list)
    """When each chunk with text was written."""


@dataclass
class FakeServer:
    """`kind` says how it misbehaves, '' for not at all."""

    ttft: float = 0.05
    gap: float = 0.01
    kind: str = ""
    served: list[Served] = field(default_factory=list)
    port: int = 0
    most_at_once: int = 0
    _now: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def completions(self) -> list[Served]:
        """Streamed requests, without those that ask about the server."""
        return [served for served in self.served if served.body.get("stream")]

    async def start(self, port: int = 0) -> asyncio.Server:
        server = await asyncio.start_server(self._connection, "127.0.0.1", port, limit=2**24)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().lower().split("\r\n")
                length = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
                body = json.loads(await reader.readexactly(length) or b"{}")
                served = Served(head.split()[1].decode(), body, time.perf_counter())
                self.served.append(served)
                await self._answer(served, writer)
                if self.kind in ("broken", "until-close") and served.body.get("stream"):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _answer(self, served: Served, writer: asyncio.StreamWriter) -> None:
        if served.path in ("/v1/models", "/health"):
            _json(writer, 200, {"data": [{"id": "fake"}]})
        elif served.path == "/tokenize" and self.kind != "no-tokenize":
            _json(writer, 200, {"count": _prompt_tokens(served.body)})
        elif served.path not in ("/v1/chat/completions", "/v1/completions"):
            _json(writer, 404, {"error": "no such route"})
        elif not served.body.get("stream"):
            _json(writer, 200, {"usage": {"prompt_tokens": _prompt_tokens(served.body)}})
        elif self.kind.startswith("status-"):
            message = {"error": {"message": "too much for me", "type": "x", "param": None, "code": None}}
            _json(writer, int(self.kind.removeprefix("status-")), message)
        else:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            await self._stream(served, writer)
            self._now -= 1

    async def _stream(self, served: Served, writer: asyncio.StreamWriter) -> None:
        is_chunked = self.kind != "until-close"
        framing = "transfer-encoding: chunked" if is_chunked else "connection: close"
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{framing}\r\n\r\n".encode())

        def send(text: str) -> None:
            data = text.encode()
            writer.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

        asked = served.body.get("max_tokens") or served.body["max_completion_tokens"]
        count = asked - (2 if self.kind == "short" else 0)
        send(TOKEN % '{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}')
        step = 2 if self.kind == "pairs" else 1
        for index in range(0, count, step):
            due = served.received + self.ttft + index * self.gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            served.sent.append(time.perf_counter())
            send(TOKEN % '{"index":0,"delta":{"content":"word "},"finish_reason":null}' + ": a comment\n\n")
            if index >= 2 * step and self.kind in ("broken", "stall", "error-event", "nonsense"):
                break
        await self._end(served, count, send)
        if is_chunked and self.kind not in ("broken", "stall"):
            writer.write(b"0\r\n\r\n")

    async def _end(self, served: Served, count: int, send: Any) -> None:
        if self.kind == "stall":
            await asyncio.sleep(5)
        elif self.kind == "error-event":
            send('data: {"error":{"message":"the engine stopped","type":"x","param":null,"code":null}}\n\n')
            send("data: [DONE]\n\n")
        elif self.kind == "nonsense":
            send("data: {{{\n\ndata: [DONE]\n\n")
        elif self.kind == "no-done":
            send(TOKEN % '{"index":0,"delta":{},"finish_reason":"length"}')
        elif self.kind != "broken":
            send(TOKEN % '{"index":0,"delta":{},"finish_reason":"length"}')
            if self.kind != "no-usage":
                details = {"prompt_tokens_details": {"cached_tokens": 4}}
                usage = {"prompt_tokens": _prompt_tokens(served.body), "completion_tokens": count, **details}
                send("data: " + json.dumps({"choices": [], "usage": usage}) + "\n\n")
            send("data: [DONE]\n\n")


def _prompt_tokens(body: dict[str, Any]) -> int:
    if "prompt" in body:
        return len(body["prompt"].split())
    texts = []
    for message in body["messages"]:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts += [part["text"] for part in parts if part["type"] == "text"]
    return OVERHEAD + len(" ".join(texts).split())


def _json(writer: asyncio.StreamWriter, status: int, document: object) -> None:
    body = json.dumps(document, indent=1).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body)))
    writer.write(body)


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """The server in a thread of its own."""
    started, loop = threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        listening = await server.start()
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            listening.close()

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(serve())
            except asyncio.CancelledError:
                return

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join(10)
        assert not thread.is_alive()


async def _main(port: int, ttft: float, gap: float) -> None:
    server = FakeServer(ttft=ttft, gap=gap)
    listening = await server.start(port)
    print(server.url, flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
