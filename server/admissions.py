"""Who may come in: the places of the queue, and what a request may bring. API process; kept by `server/client.py`.

The limits are the server's, however many engines it has: places for the sequences that all engines run and for
`max_queued_requests` that wait, prompt tokens and pixels of all of them together.
"""

import time
from collections.abc import Callable

from scheduler.config import SchedulerConfig
from server.client_pixels import PixelLedger
from server.errors import BadRequest, Overloaded
from server.generation import GenerationRequest
from server.replay import LiveSequences


class Admission:
    """A place in the queue: counted from the door until the request ends."""

    def __init__(self, admissions: "Admissions", deadline: float) -> None:
        self._admissions, self._held = admissions, True
        self.deadline = deadline
        """time.monotonic() at which the request's time is over."""

    def release(self) -> None:
        """Give the place back. Idempotent; harmless after submit, which does it too."""
        self._admissions.reserved -= self._held
        self._held = False


class Admissions:
    """What was admitted and has not ended: bodies that are still being read, and the live sequences."""

    def __init__(
        self,
        config: SchedulerConfig,
        sequences: LiveSequences,
        pixels: PixelLedger,
        require_attention: Callable[[], None],
    ) -> None:
        self._config, self._sequences, self._pixels = config, sequences, pixels
        self._require_attention = require_attention
        self.reserved = 0
        """Places taken at the door by requests whose body is still being read."""

    def require_places(self, count: int) -> None:
        """For so many sequences. Raises Overloaded."""
        self._require_attention()
        taken = self.reserved + len(self._sequences)
        if taken + count > self._config.max_outstanding:
            raise Overloaded(
                f"the queue is full: {taken} sequences are running or waiting and "
                f"{self._config.max_outstanding} is the limit; try again"
            )

    def admit(self) -> Admission:
        """Take a place for one sequence. Raises Overloaded."""
        self.require_places(1)
        self.reserved += 1
        return Admission(self, time.monotonic() + self._config.request_timeout)

    def require_room(self, requests: list[GenerationRequest]) -> None:
        """For what the requests bring. Raises Overloaded; BadRequest for what even an empty queue would not hold."""
        sequences = sum(request.n for request in requests)
        tokens = sum(len(request.prompt_ids) * request.n for request in requests)
        most_sequences, most_tokens = self._config.max_outstanding, self._config.max_queued_tokens
        if sequences > most_sequences:
            raise BadRequest(f"The request has {sequences} sequences; the queue holds {most_sequences}.", param="n")
        if tokens > most_tokens:
            raise BadRequest(f"The request has {tokens} prompt tokens in all; the queue holds {most_tokens}.")
        held = self._sequences.prompt_tokens
        if held + tokens > most_tokens:
            raise Overloaded(f"the queue holds {held} prompt tokens and has no room for {tokens} more")
        self._pixels.require_room(requests)
