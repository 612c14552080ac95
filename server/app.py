"""The gateway's application: middleware, routes, and how errors become answers. API process; never imports torch."""

import time

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from model_runtime.pooling_config import PoolingRecipe
from server.api import chat, completions, embeddings, health, models, openapi, tokens
from server.api.gateway import Gateway, record_of
from server.auth import Authentication
from server.dialect import error_body
from server.door import Door
from server.errors import ApiError, InternalError, MethodNotAllowed, NotFound
from server.gateway_config import GatewayConfig
from server.generation import Engine
from server.grammar.grammar import Checker
from server.held_body import BodyBudget
from server.images import ImagePipeline
from server.messages import routes as messages
from server.metrics import Metrics
from server.middleware import RequestContext
from server.output_forms import OutputForms
from server.prompt.build import PromptBuilder
from server.prompt.tokenizer import Tokenizer
from server.responses import routes as responses
from server.responses.store import ResponseStore

EXPOSED_HEADERS = ("x-request-id", "x-ignored-params", "retry-after")


def create_app(
    config: GatewayConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    model_name: str,
    grammars: Checker,
    images: ImagePipeline | None = None,
    pooling: PoolingRecipe | None = None,
) -> FastAPI:
    """`model_name` is what the model is called unless the configuration names it; `images` is None for a model that
    takes none, `pooling` for one that makes no embeddings. Raises CheckpointError for a faulty chat template."""
    names = config.model_names(model_name)
    app = FastAPI(
        title="firstlight",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=_middleware(config, engine),
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_exception},
    )
    preprocessor = None if images is None else images.preprocessor
    prompts = PromptBuilder(tokenizer, preprocessor, tool_parser=config.tool_call_parser)
    app.state.gateway = Gateway(
        config=config,
        engine=engine,
        prompts=prompts,
        forms=OutputForms(prompts),
        images=images,
        pooling=pooling,
        grammars=grammars,
        metrics=Metrics(engine, names[0]),
        responses=ResponseStore(
            max_count=config.max_stored_responses,
            max_bytes=config.max_stored_response_bytes,
            seconds=config.stored_response_seconds,
        ),
        model_names=names,
        created=int(time.time()),
    )
    for module in (chat, completions, responses, messages, embeddings, models, tokens, health):
        app.include_router(module.router)
    openapi.install(app)
    return app


def _middleware(config: GatewayConfig, engine: Engine) -> list[Middleware]:
    """Outermost first. Preflight requests carry no key, so CORS comes before authentication."""
    layers = [Middleware(RequestContext, access_log=config.access_log)]
    if config.cors_allow_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_allow_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=EXPOSED_HEADERS,
            )
        )
    routes = (chat, completions, responses, messages, embeddings)
    door = Middleware(Door, engine=engine, paths=frozenset(module.PATH for module in routes))
    bodies = Middleware(BodyBudget, limit=config.max_held_body_bytes, require_memory=engine.require_memory)
    return [*layers, Middleware(Authentication, keys=config.api_key), door, bodies]


def _answer(request: Request, error: ApiError) -> Response:
    body = error_body(error, request.url.path, record_of(request).request_id)
    return JSONResponse(body, status_code=error.status, headers=error.headers())


async def _on_api_error(request: Request, error: Exception) -> Response:
    return _answer(request, error if isinstance(error, ApiError) else InternalError("The server had an error."))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown paths and methods."""
    if not isinstance(error, HTTPException) or error.status_code not in (404, 405):
        raise error
    if error.status_code == MethodNotAllowed.status:
        answer = _answer(request, MethodNotAllowed(f"The method {request.method[:20]} is not allowed here."))
    else:
        answer = _answer(request, NotFound("Unknown path."))
    answer.headers.update(error.headers or {})
    return answer
