"""What the scheduler tells about itself. Made by `Scheduler.stats`, read by the engine's loop, engine process."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges, then counters that never fall."""

    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    """Unused but filled: as available to new requests as free ones."""
    total_blocks: int
    encoder_bytes: int
    """Image embeddings that the runtime keeps."""
    preemptions: int
    prefix_queries: int
    """Prompt tokens of sequences that looked into the prefix cache when they first ran."""
    prefix_hits: int
    """Those of them that were found."""
    prompt_tokens: int
    """Of sequences that produced their first token."""
    generation_tokens: int
    encoder_hits: int
    """Images that a sequence needed and found encoded."""
    images_encoded: int


@dataclass(slots=True)
class Counters:
    """The counters that the scheduler keeps itself."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
