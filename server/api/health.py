"""GET /health/live, /health/ready (vLLM's clients call it /health), /health/progress and /metrics. API process; the
health routes need no API key.
"""

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from server import health
from server.api.gateway import gateway_of
from server.errors import Unavailable

router = APIRouter()


@router.get("/health/live")
async def live() -> JSONResponse:
    """Whether this process answers."""
    return JSONResponse(health.LIVE)


@router.get("/health")
@router.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """Whether a request would run; else 503 with the reason. A full queue is no reason: that passes."""
    engine = gateway_of(request).engine
    if (reason := engine.unready_reason()) is not None:
        raise Unavailable(reason)
    return JSONResponse({"status": "overloaded" if engine.is_full else "ok"})


@router.get("/health/progress")
async def progress(request: Request) -> JSONResponse:
    """What the engines are doing."""
    return JSONResponse(health.progress(gateway_of(request).engine.replicas))


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(gateway_of(request).metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})
