"""Sends the sessions of one level to one server and keeps what came back. Used by `loadtest/runner.py`.

One thread, one event loop. Sessions are made before the clock starts, so that drawing pictures costs no latency.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loadtest.http_client import StreamingClient, TransportError
from loadtest.probe import ROUTES
from loadtest.record import Record
from loadtest.settings import Settings
from loadtest.sse import CompletionReader
from loadtest.workload import Message, Session, Turn

OnRecord = Callable[[Record], None]
"""Told of each finished request, for the progress display."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Sends turns in one server's dialect."""

    client: StreamingClient
    settings: Settings
    model: str
    on_record: OnRecord

    async def session(self, session: Session, scheduled: float | None) -> list[Record]:
        """Take all turns; a turn that fails ends the session. `scheduled` is the wanted time of the first one."""
        messages: list[Message] = []
        records: list[Record] = []
        for turn in session.turns:
            messages += turn.messages
            record, answer = await self._turn(messages, turn, scheduled)
            records.append(record)
            self.on_record(record)
            if record.error:
                break
            messages.append({"role": "assistant", "content": answer})
            scheduled = None
        return records

    async def _turn(self, messages: list[Message], turn: Turn, scheduled: float | None) -> tuple[Record, str]:
        body = msgspec.json.encode(self._body(messages, turn))
        start = time.perf_counter()
        record = Record(
            scheduled=start if scheduled is None else scheduled, start=start, wanted_output_tokens=turn.output_tokens
        )
        reader = CompletionReader(record)
        try:
            status = await self.client.post(ROUTES[self.settings.api], body, reader.on_piece)
            reader.finish(status)
        except TransportError as error:
            record.fail(error.kind, str(error))
        if record.error:
            record.end = time.perf_counter()
        return record, "".join(reader.text)

    def _body(self, messages: list[Message], turn: Turn) -> dict[str, Any]:
        settings = self.settings
        if settings.api == "chat":
            prompt: dict[str, Any] = {"messages": messages}
        else:
            prompt = {"prompt": "\n".join(message["content"] for message in messages)}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": turn.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if settings.ignore_eos else {}),
            **settings.extra_body,
        }


async def closed_loop(sender: Sender, sessions: Sequence[Session], concurrency: int, ramp: float) -> list[Record]:
    """`concurrency` users who take the next session as soon as theirs has ended; they come evenly spread over `ramp`
    seconds."""
    waiting = iter(sessions)
    records: list[Record] = []
    users = min(concurrency, len(sessions))

    async def user(index: int) -> None:
        await asyncio.sleep(ramp * index / users)
        for session in waiting:
            records.extend(await sender.session(session, None))

    async with asyncio.TaskGroup() as group:
        for index in range(users):
            group.create_task(user(index))
    return records


async def open_loop(sender: Sender, sessions: Sequence[Session], offsets: Sequence[float]) -> list[Record]:
    """Each session at its time, however many are under way."""
    start = time.perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for session, offset in zip(sessions, offsets, strict=True):
            await asyncio.sleep(max(0.0, start + offset - time.perf_counter()))
            tasks.append(group.create_task(sender.session(session, start + offset)))
    return [record for task in tasks for record in task.result()]
