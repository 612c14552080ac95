"""What every route needs, gathered once by `server/app.py`. API process."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import Request

from model_runtime.pooling_config import PoolingRecipe
from server.errors import NotFound
from server.gateway_config import GatewayConfig
from server.generation import Admission, Engine
from server.grammar.grammar import Checker
from server.held_body import HeldBody
from server.images import ImagePipeline
from server.metrics import Metrics
from server.middleware import RequestRecord
from server.output_forms import OutputForms
from server.prompt.build import PromptBuilder
from server.prompt.tokenizer import Tokenizer
from server.responses.store import ResponseStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts of the API process that routes talk to."""

    config: GatewayConfig
    engine: Engine
    prompts: PromptBuilder
    forms: OutputForms
    images: ImagePipeline | None
    """None for a model that takes no images."""
    pooling: PoolingRecipe | None
    """How embeddings are made; None for a model that makes none."""
    grammars: Checker
    metrics: Metrics
    responses: ResponseStore
    model_names: tuple[str, ...]
    """What clients may call the model; the first is its own name."""
    created: int
    """Unix time at which the gateway was made."""
    parsing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a large body is parsed: several parsers would keep the event loop from its turn for longer."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        return self.prompts.tokenizer

    def check_model(self, name: str) -> None:
        """Raises NotFound for a model that is not served."""
        if name not in self.model_names:
            raise NotFound(
                f"The model `{name[:100]}` does not exist; `{self.model_names[0]}` is served here.",
                param="model",
                code="model_not_found",
            )


def gateway_of(request: Request) -> Gateway:
    """Of the app that serves the request."""
    return cast(Gateway, request.app.state.gateway)


def record_of(request: Request) -> RequestRecord:
    """Of this request."""
    return cast(RequestRecord, request.scope["state"]["record"])


def held_body_of(request: Request) -> HeldBody:
    """What is counted of this request's body (`server/held_body.py`)."""
    return cast(HeldBody, request.scope["state"]["held_body"])


def tenant_of(request: Request) -> bytes:
    """Whose request it is (`server/auth.py`)."""
    return cast(bytes, request.scope["state"]["tenant"])


def admission_of(request: Request) -> Admission:
    """Of this request, taken at the door (`server/door.py`), which also releases it."""
    return cast(Admission, request.scope["state"]["admission"])
