"""The events of one request between the client's receive loop and the reader: one bounded queue, all choices.

Part of step 3 of a request's path. Made and fed by `server/client.py`, read by `server/stream.py`; API process.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from scheduler.request import FinishReason
from server.wire import Event

logger = logging.getLogger(__name__)


class ClientStream:
    """The events of one request; choice i is the sequence seq_ids[i], and `abort` cancels sequences in the engine."""

    def __init__(
        self, abort: Callable[[list[int]], None], seq_ids: Sequence[int], prompt_tokens: int, max_unread: int
    ) -> None:
        self._abort, self._seq_ids, self.prompt_tokens = abort, seq_ids, prompt_tokens
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue(max_unread)
        self.live = set(range(len(seq_ids)))
        """Choices that have not ended; the client takes them out."""
        self._finished_here: set[int] = set()

    def deliver(self, choice: int, event: Event) -> None:
        """Called by the client's receive loop. A reader that left too much unread is cut off."""
        try:
            self._queue.put_nowait((choice, event))
        except asyncio.QueueFull:
            logger.warning("a client left %d events unread: its request is cancelled", self._queue.maxsize)
            self.close()
            while not self._queue.empty():
                self._queue.get_nowait()
            message = "the response was not read fast enough"
            end = Event(event.seq_id, finish_reason=FinishReason.ERROR, message=message)
            self._queue.put_nowait((choice, end))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(choice, event) until every choice has ended."""
        while self.live or not self._queue.empty():
            choice, event = await self._queue.get()
            if choice not in self._finished_here:
                yield choice, event

    def finish_choice(self, index: int) -> None:
        """The gateway ended this choice itself: cancel it in the engine, deliver no more of its events."""
        self._finished_here.add(index)
        if index in self.live:
            self._abort([self._seq_ids[index]])

    def close(self) -> None:
        """Cancel what is unfinished. Idempotent, never blocks."""
        if self.live:
            self._abort([self._seq_ids[choice] for choice in sorted(self.live)])
