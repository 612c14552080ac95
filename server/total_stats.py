"""The statistics of several engines as those of one. Used by `server/client.py` and `server/health.py`."""

from collections.abc import Iterable
from itertools import zip_longest

import msgspec

from server.wire import Stats

_SUMMED = (
    "step_id",
    "running",
    "waiting",
    "free_blocks",
    "cached_blocks",
    "total_blocks",
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "prompt_tokens",
    "generation_tokens",
    "encoder_bytes",
    "encoder_hits",
    "images_encoded",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
)


def sums(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Entry by entry; what is missing at an end is 0."""
    return tuple(left + right for left, right in zip_longest(first, second, fillvalue=0))


def total(replicas: Iterable[Stats | None]) -> Stats | None:
    """Of those that are there, None where there is none: counts are added up, steps too; the generation and the
    time of the last step are the newest. What ranks tell stays with their engines."""
    there = [stats for stats in replicas if stats is not None]
    if len(there) < 2:
        return there[0] if there else None
    result = there[0]
    for other in there[1:]:
        result = msgspec.structs.replace(
            result,
            **{name: getattr(result, name) + getattr(other, name) for name in _SUMMED},
            generation=max(result.generation, other.generation),
            last_step_time=max(result.last_step_time, other.last_step_time),
            busy=result.busy or other.busy,
            accepted_per_position=sums(result.accepted_per_position, other.accepted_per_position),
            ranks=(),
        )
    return result
