"""What the scheduler tells about itself. Made by `Scheduler.stats`, read by the engine's loop, engine process."""

from dataclasses import dataclass

from scheduler.block_pool import BlockPool
from scheduler.images import ImagePlanner


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Counters that never fall."""

    drafts: int = 0
    """Times that a sequence had drafts in a step."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Drafts that became output,"""
    accepted_per_position: tuple[int, ...] = ()
    """by their place behind the newest token; places where none ever did may be missing at the end."""


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
    speculation: SpeculationStats
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

    def stats(
        self, running: int, waiting: int, pool: BlockPool, images: ImagePlanner, speculation: SpeculationStats
    ) -> SchedulerStats:
        """These and what others count."""
        return SchedulerStats(
            running=running,
            waiting=waiting,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            total_blocks=pool.num_blocks,
            encoder_bytes=images.num_bytes,
            preemptions=self.preemptions,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            speculation=speculation,
            encoder_hits=images.num_hits,
            images_encoded=images.num_encoded,
        )

    def look_up(self, queries: int, hits: int) -> None:
        """A sequence looked for its prompt in the prefix cache when it first ran."""
        self.prefix_queries += queries
        self.prefix_hits += hits
