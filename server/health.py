"""What the health routes say: the documents that the main port (`api/health.py`, API process) and the health port
(`health_port.py`, supervisor process) share.
"""

import time
from typing import Any

from server.wire import Stats

LIVE = {"status": "ok"}


def progress(stats: Stats | None) -> dict[str, Any]:
    """What the engine is doing: age of its last step in seconds (null before the first), queue and KV blocks."""
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
