"""POST /tokenize and /detokenize, shaped like vLLM's, and /v1/chat/completions/input_tokens, like llama.cpp's.

API process. The engine takes no part, but images are work and need a place in its queue.
"""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.body import read_body
from server.api.conversation import options_of, prompt_of, prompt_of_chat
from server.api.gateway import Gateway, gateway_of
from server.api.openapi import describe
from server.api.render import json_of, json_response
from server.errors import context_overflow
from server.prompt.build import check_ids
from server.schema.chat import ChatBody
from server.schema.tokens import DetokenizeBody, TokenizeBody

router = APIRouter()


@router.post("/tokenize", openapi_extra=describe(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Token ids of a raw prompt or of a conversation, as generation would use them."""
    gateway = gateway_of(request)
    body, ignored = await read_body(request, gateway, TokenizeBody)
    body.check_together()
    if body.model is not None:
        gateway.check_model(body.model)
    ids = await _ids(request, gateway, body)
    document: dict[str, object] = {
        "count": len(ids),
        "max_model_len": gateway.engine.info.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        token_text = gateway.tokenizer.token_text
        document["token_strs"] = await json_of(lambda: [token_text(id) for id in ids], in_thread=True)
    return json_response(document, ignored)


async def _ids(request: Request, gateway: Gateway, body: TokenizeBody) -> list[int]:
    limit = gateway.engine.info.max_model_len
    if body.messages is not None:
        return (await prompt_of(request, gateway, body.messages, None, options_of(gateway, body))).ids.tolist()
    text = body.prompt or ""
    if len(text) > limit * gateway.tokenizer.max_token_bytes:
        raise context_overflow(len(text) // gateway.tokenizer.max_token_bytes, limit, param="prompt")
    special = body.add_special_tokens is not False
    return (await gateway.tokenizer.encode_async(text, add_special_tokens=special, allow_special=True)).tolist()


@router.post("/v1/chat/completions/input_tokens", openapi_extra=describe(ChatBody))
async def input_tokens(request: Request) -> Response:
    """How many tokens the prompt of a chat request has, images included."""
    gateway = gateway_of(request)
    body, ignored = await read_body(request, gateway, ChatBody)
    prompt = await prompt_of_chat(request, gateway, body, None)
    return json_response(count_document(len(prompt.ids)), ignored)


def count_document(count: int) -> dict[str, object]:
    """The answer of OpenAI's routes that count."""
    return {"object": "response.input_tokens", "input_tokens": count}


@router.post("/detokenize", openapi_extra=describe(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    gateway = gateway_of(request)
    body, ignored = await read_body(request, gateway, DetokenizeBody)
    if body.model is not None:
        gateway.check_model(body.model)
    check_ids(gateway.tokenizer, body.tokens, "tokens")
    text = await asyncio.to_thread(gateway.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text}, ignored)
