"""POST /v1/embeddings: one vector for each text, in OpenAI's shapes. API process."""

import base64
from dataclasses import dataclass

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from model_runtime.pooling_config import PoolingRecipe
from scheduler.request import SamplingParams
from server.api.body import read_body
from server.api.disconnect import while_connected
from server.api.gateway import Gateway, admission_of, gateway_of, record_of
from server.api.openapi import describe
from server.api.render import json_response
from server.embedding import PooledStates, finished_vector
from server.errors import BadRequest
from server.generation import GenerationRequest
from server.metrics import RequestMeter
from server.prompt.options import keep_last
from server.schema.embeddings import EmbeddingsBody

PATH = "/v1/embeddings"
router = APIRouter()

NOT_SAMPLED = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How vectors are made and written."""

    recipe: PoolingRecipe
    length: int | None
    """Numbers of a vector that are kept; None for all."""
    as_base64: bool

    def embedding(self, pooled: bytes, num_tokens: int) -> list[float] | str:
        """What the engine pooled of a text, as the answer has it."""
        vector = finished_vector(pooled, num_tokens, self.recipe, self.length)
        return _base64(vector) if self.as_base64 else vector.tolist()


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


@router.post(PATH, openapi_extra=describe(EmbeddingsBody))
async def embeddings(request: Request) -> Response:
    """The vectors of one or several texts."""
    gateway = gateway_of(request)
    body, ignored = await read_body(request, gateway, EmbeddingsBody)
    body.check_together(gateway.config.max_sequences_per_request)
    gateway.check_model(body.model)
    form = _form(gateway, body)
    requests = await _requests(gateway, body, form)
    record = record_of(request)
    record.request_id = body.request_id or record.request_id
    streams = gateway.engine.submit(requests, admission_of(request))
    record.prompt_tokens = sum(len(asked.prompt_ids) for asked in requests)
    states = PooledStates(requests, streams, RequestMeter(gateway.metrics, record.started))
    try:
        pooled = await while_connected(request.receive, record, states.collect())
    finally:
        states.close()
    return json_response(_document(body.model, form, requests, pooled), ignored)


def _form(gateway: Gateway, body: EmbeddingsBody) -> Form:
    """Raises BadRequest for a model that makes no vectors, or none of the length that is asked for."""
    recipe = gateway.pooling
    if recipe is None:
        raise BadRequest(
            "This model's checkpoint does not say how to make embeddings of its hidden states. Serve it with "
            "--pooling mean or --pooling last to have them, or use an embedding model.",
            param="model",
        )
    length = None if body.dimensions == gateway.engine.info.hidden_size else body.dimensions
    if length is not None:
        _check_length(length, gateway.engine.info.hidden_size, recipe)
    return Form(recipe=recipe, length=length, as_base64=body.encoding_format == "base64")


def _check_length(length: int, most: int, recipe: PoolingRecipe) -> None:
    if length > most:
        raise BadRequest(f"dimensions {length} exceeds the {most} of this model's embeddings.", param="dimensions")
    if not recipe.can_be_cut:
        raise BadRequest(
            f"This model's embeddings have {most} dimensions and were not trained to be cut, or its config.json lacks "
            "is_matryoshka or matryoshka_dimensions, which say so.",
            param="dimensions",
        )
    if recipe.lengths and length not in recipe.lengths:
        allowed = ", ".join(map(str, recipe.lengths))
        raise BadRequest(f"dimensions {length} is none of those that the model allows: {allowed}.", param="dimensions")


async def _requests(gateway: Gateway, body: EmbeddingsBody, form: Form) -> list[GenerationRequest]:
    limit = gateway.engine.info.max_model_len
    all_ids = await gateway.prompts.completions(
        body.input,
        max_model_len=limit,
        add_special_tokens=body.add_special_tokens is not False,
        keep_last=keep_last(body.truncate_prompt_tokens, limit, answer=0),
        param="input",
        least_output=0,
    )
    return [
        GenerationRequest(
            prompt_ids=ids,
            sampling=NOT_SAMPLED,
            priority=body.priority or 0,
            cache_salt=body.salt,
            pooling=form.recipe.kind,
        )
        for ids in all_ids
    ]


def _document(model: str, form: Form, requests: list[GenerationRequest], pooled: list[bytes]) -> dict[str, object]:
    lengths = [len(asked.prompt_ids) for asked in requests]
    data = [
        {"object": "embedding", "index": index, "embedding": form.embedding(states, num_tokens)}
        for index, (states, num_tokens) in enumerate(zip(pooled, lengths, strict=True))
    ]
    usage = {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    return {"object": "list", "data": data, "model": model, "usage": usage}
