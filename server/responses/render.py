"""A generation as a response of the Responses API: events in OpenAI's order, or one document. API process.

Used by the routes of `server/responses`. Whatever ends the generation, what is kept of the response says so.
"""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from server.api.logprobs import TokenNaming, chat_entries
from server.api.render import named_event
from server.choice import Delta
from server.errors import ApiError, InternalError
from server.responses.document import completed, failed
from server.responses.keeper import Keeper
from server.responses.output import Event, Output
from server.stream import Generation


class ResponseRenderer:
    """Events and the document of one response."""

    last = b""

    def __init__(self, keeper: Keeper, naming: TokenNaming, *, wants_logprobs: bool) -> None:
        self._keeper, self._naming, self._wants_logprobs = keeper, naming, wants_logprobs
        self._output = Output()
        self._sequence_number = 0

    async def chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        async with aclosing(self._events(generation)) as all_events:
            async for events in all_events:
                self._keeper.is_known = True
                yield self._encoded(events)

    async def document(self, generation: Generation) -> dict[str, object]:
        """The plain JSON answer."""
        async with aclosing(self._events(generation)) as all_events:
            async for _ in all_events:
                continue
        return self._keeper.document

    def failure(self, error: ApiError) -> bytes:
        """The event that tells of an error in mid-stream."""
        return self._encoded([("failed", {"response": failed(self._keeper.document, self._output.items, error)})])

    def close(self) -> None:
        """The answer has ended. A response that has not was cancelled."""
        if self._keeper.is_running:
            list(self._output.end("incomplete"))
            self._keeper.end(self._keeper.document | {"status": "cancelled", "output": self._output.items})

    async def _events(self, generation: Generation) -> AsyncGenerator[list[Event], None]:
        """Events, step by step; what is kept is brought up to date before they are given out."""
        try:
            events, reason = self._begin(), None
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    yield events + self._push(delta)
                    events, reason = [], delta.finish_reason
            is_cut = reason == "length"
            final = completed(self._keeper.document, self._output.items, generation.usage(), is_cut=is_cut)
            self._keeper.update(final)
            yield [("incomplete" if is_cut else "completed", {"response": final})]
        except Exception as error:
            known = error if isinstance(error, ApiError) else InternalError("The server had an error.")
            self._keeper.end(failed(self._keeper.document, self._output.items, known))
            raise

    def _begin(self) -> list[Event]:
        self._keeper.update(self._keeper.document | {"status": "in_progress"})
        response = self._keeper.document
        return [("created", {"response": response}), ("in_progress", {"response": response})]

    def _push(self, delta: Delta) -> list[Event]:
        logprobs = chat_entries(delta.tokens, self._naming) if self._wants_logprobs else []
        return list(self._output.push(delta, logprobs))

    def _encoded(self, events: Iterable[Event]) -> bytes:
        chunks = []
        for name, fields in events:
            chunks.append(named_event(f"response.{name}", {"sequence_number": self._sequence_number} | fields))
            self._sequence_number += 1
        return b"".join(chunks)
