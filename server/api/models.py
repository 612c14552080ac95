"""GET /v1/models and /v1/models/{id}. API process."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from server.api.gateway import Gateway, gateway_of
from server.errors import Unavailable

router = APIRouter()


def _model(gateway: Gateway, name: str) -> dict[str, object]:
    card: dict[str, object] = {"id": name, "object": "model", "created": gateway.created, "owned_by": "firstlight"}
    try:
        card["max_model_len"] = gateway.engine.info.max_model_len
    except Unavailable:
        card["max_model_len"] = None
    return card


@router.get("/v1/models")
async def list_models(request: Request) -> JSONResponse:
    """The model under each of its names."""
    gateway = gateway_of(request)
    return JSONResponse({"object": "list", "data": [_model(gateway, name) for name in gateway.model_names]})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> JSONResponse:
    """One name of the model."""
    gateway = gateway_of(request)
    gateway.check_model(model_id)
    return JSONResponse(_model(gateway, model_id))
