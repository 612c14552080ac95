"""One request as the client saw it, and the times that follow from it. Filled by `loadtest/sse.py`, summed up by
`loadtest/metrics.py`. Times are seconds of `time.perf_counter`."""

import itertools
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Record:
    """Arrivals of one answer. `ttft`, `tpot`, `gaps` and `latency` are defined as docs/loadtest.md states."""

    scheduled: float
    """When the load wanted it sent; equal to `start` in a closed loop."""
    start: float = 0.0
    """Before the connection is taken and the request written."""
    content_times: list[float] = field(default_factory=list)
    """Arrival of each chunk that carried text (or reasoning, or a part of a tool call)."""
    end: float = 0.0
    """Arrival of the last chunk with text or a finish reason; the usage chunk and [DONE] do not count."""
    wanted_output_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    has_usage: bool = False
    """Whether the server counted the tokens."""
    error: str = ""
    """Kind of failure, '' for none."""
    detail: str = ""

    def fail(self, kind: str, detail: str) -> None:
        """Mark as failed; the first reason stands."""
        if not self.error:
            self.error, self.detail = kind, detail

    @property
    def num_output_tokens(self) -> int:
        """As the server counts; where it does not, one a chunk."""
        return self.output_tokens if self.has_usage else len(self.content_times)

    @property
    def ttft(self) -> float:
        """Time to first token: from the start to the first chunk with text, or to the end where there is no text."""
        return (self.content_times[0] if self.content_times else self.end) - self.start

    @property
    def latency(self) -> float:
        """End to end: from the start to the last chunk."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for answers of one token."""
        further = self.num_output_tokens - 1
        return (self.latency - self.ttft) / further if further > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latency: between chunks with text that follow each other."""
        return [later - earlier for earlier, later in itertools.pairwise(self.content_times)]

    @property
    def lateness(self) -> float:
        """How much later than scheduled it was sent: the client's own fault."""
        return self.start - self.scheduled
