"""What the health routes say: the documents that the main port (`api/health.py`, API process) and the health port
(`health_port.py`, supervisor process) share.
"""

import time
from collections.abc import Sequence
from typing import Any

from server.total_stats import total
from server.wire import Stats

LIVE = {"status": "ok"}


def progress(replicas: Sequence[Stats | None]) -> dict[str, Any]:
    """What the engine is doing; of several what they do together, and each of them."""
    together = _progress(total(replicas))
    return together | {"replicas": [_progress(stats) for stats in replicas]} if len(replicas) > 1 else together


def _progress(stats: Stats | None) -> dict[str, Any]:
    """Age of the last step in seconds (null before the first), queue and KV blocks."""
    if stats is None:
        return {"status": "no engine"}
    return {
        "status": "busy" if stats.busy else "idle",
        "generation": stats.generation,
        "steps": stats.step_id,
        "last_step_age_seconds": time.monotonic() - stats.last_step_time if stats.last_step_time else None,
        "running": stats.running,
        "waiting": stats.waiting,
        "free_blocks": stats.free_blocks,
        "cached_blocks": stats.cached_blocks,
        "total_blocks": stats.total_blocks,
    }
