"""What a route asks of the engine, and the stream of events that comes back: the seam between HTTP and engine.

`server/api/*` and `server/stream.py` depend on these types only; `server/client.py` implements them over ZeroMQ and
tests implement them with a scripted fake. API process.
"""

from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from model_runtime.config import RuntimeInfo
from scheduler.request import NO_IMAGES, Pooling, PromptImages, SamplingParams
from server.wire import Event, Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt, n choices. Every API surface translates into this."""

    prompt_ids: "array[int]"
    """int32, non-empty, within the vocabulary, shorter than max_model_len; as long at most where it is pooled."""
    sampling: SamplingParams
    """`seed` holds the request's seed; the client mixes it with the index of each choice."""
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    priority: int = 0
    cache_salt: bytes = b""
    images: PromptImages = NO_IMAGES
    """Each with its pixels."""
    pooling: Pooling | None = None
    """As in `scheduler.request.Request`; then n is 1, and the only event of the engine has the pooled states."""


@dataclass(slots=True)
class RecoveryStats:
    """Counters that never fall."""

    engines_lost: int = 0
    sequences_replayed: int = 0
    sequences_resumed: int = 0
    """Those that had a token since,"""
    pause_seconds: float = 0.0
    """and the time from the loss of the engine to that token, all together."""
    sequences_quarantined: int = 0


class RequestStream(Protocol):
    """The events of one GenerationRequest. Must be closed; closing cancels what is unfinished, at once."""

    def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(index of the choice, event) in order of arrival; ends after the last choice's terminal event, which is
        also what a refusal or a failure of the engine is (`errors.from_engine` tells)."""
        ...

    def finish_choice(self, index: int) -> None:
        """The gateway ended this choice itself (a stop string matched): cancel it in the engine, count it as 'stop'
        and deliver no more of its events."""
        ...

    def close(self) -> None:
        """Cancel every unfinished choice and release the admission. Idempotent, never blocks."""
        ...


class Admission(Protocol):
    """A place in the queue, taken at the door, before the body is read. Must be released or handed to submit."""

    @property
    def deadline(self) -> float:
        """time.monotonic() at which the request's time is over, whatever has been done for it by then."""
        ...

    def release(self) -> None:
        """Give the place back. Idempotent; harmless after submit."""
        ...


class Engine(Protocol):
    """The engine as the gateway sees it."""

    @property
    def info(self) -> RuntimeInfo:
        """Facts of the loaded model. Raises Unavailable before the first engine is ready."""
        ...

    @property
    def replicas(self) -> tuple[Stats | None, ...]:
        """The newest statistics of each engine, None while there is none."""
        ...

    @property
    def recovery(self) -> RecoveryStats:
        """What became of the sequences of engines that were lost."""
        ...

    @property
    def is_full(self) -> bool:
        """A new request would be refused for now: that passes."""
        ...

    def require_memory(self) -> None:
        """Raises Overloaded while the machine has too little memory for more."""
        ...

    def unready_reason(self) -> str | None:
        """Why a new request would not run at once; None when it would, if the queue has room."""
        ...

    def admit(self) -> Admission:
        """Take a place for one sequence. Raises Overloaded when the queue is full, Unavailable when loading,
        draining, or down for good; between two engines it only waits."""
        ...

    def submit(self, requests: list[GenerationRequest], admission: Admission) -> list[RequestStream]:
        """Start them all or none (a completions call with several prompts is one admission). Raises Overloaded."""
        ...
