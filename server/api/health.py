"""GET /health/live, /health/ready (vLLM's clients call it /health), /health/progress and /metrics. API process; the
health routes need no API key.
"""

import time

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from server.api.gateway import gateway_of
from server.errors import Overloaded, Unavailable

router = APIRouter()


@router.get("/health/live")
async def live() -> JSONResponse:
    """Whether this process answers."""
    return JSONResponse({"status": "ok"})


@router.get("/health")
@router.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """Whether a request would run; else 503 with the reason. A full queue is no reason: that passes."""
    engine = gateway_of(request).engine
    if (reason := engine.unready_reason()) is not None:
        raise Unavailable(reason)
    try:
        engine.admit().release()
    except Overloaded:
        return JSONResponse({"status": "overloaded"})
    return JSONResponse({"status": "ok"})


@router.get("/health/progress")
async def progress(request: Request) -> JSONResponse:
    """What the engine is doing: age of its last step in seconds (null before the first), queue and KV blocks."""
    stats = gateway_of(request).engine.stats
    if stats is None:
        return JSONResponse({"status": "no engine"})
    age = time.monotonic() - stats.last_step_time if stats.last_step_time else None
    return JSONResponse(
        {
            "status": "busy" if stats.busy else "idle",
            "generation": stats.generation,
            "steps": stats.step_id,
            "last_step_age_seconds": age,
            "running": stats.running,
            "waiting": stats.waiting,
            "free_blocks": stats.free_blocks,
            "cached_blocks": stats.cached_blocks,
            "total_blocks": stats.total_blocks,
        }
    )


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(gateway_of(request).metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})
