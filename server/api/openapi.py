"""The OpenAPI document: bodies that routes read themselves, and the shapes of all answers. Used by `server/app.py`.

API process.
"""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.dialect import is_anthropic
from server.schema.chat import ChatBody
from server.schema.completions import CompletionBody
from server.schema.embeddings import EmbeddingsBody
from server.schema.messages import CountTokensBody, MessagesBody
from server.schema.responses import CountBody, ResponsesBody
from server.schema.tokens import DetokenizeBody, TokenizeBody

Schema = dict[str, Any]

REF = "#/components/schemas/{model}"
BODIES: tuple[type[BaseModel], ...] = (
    ChatBody,
    CompletionBody,
    EmbeddingsBody,
    ResponsesBody,
    CountBody,
    MessagesBody,
    CountTokensBody,
    TokenizeBody,
    DetokenizeBody,
)
FASTAPI_ERRORS = ("HTTPValidationError", "ValidationError")
"""Shapes that FastAPI declares and no route here ever answers."""


def _object(properties: Schema, optional: Schema | None = None) -> Schema:
    """An object that has all of these properties, and perhaps others."""
    return {"type": "object", "required": list(properties), "properties": properties | (optional or {})}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
_FINISH = {"enum": ["stop", "length", "tool_calls", "content_filter", "function_call"]}
_CHOICE = {"index": _COUNT, "logprobs": {"type": ["object", "null"]}, "finish_reason": _FINISH}
_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": {
            "type": "object",
            "required": ["cached_tokens"],
            "properties": {"cached_tokens": _COUNT, "image_tokens": _COUNT},
        },
    }
)
_CALL = _object({"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})})
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _TEXT_OR_NULL, "refusal": _TEXT_OR_NULL},
    {"reasoning_content": _TEXT, "tool_calls": _list(_CALL)},
)
_EMBEDDING = _object(
    {"object": {"const": "embedding"}, "index": _COUNT, "embedding": {"anyOf": [_list({"type": "number"}), _TEXT]}}
)
_STATUS = _object({"status": _TEXT})


def _generation(kind: str, choice: Schema) -> Schema:
    head = {"id": _TEXT, "object": {"const": kind}, "created": _COUNT, "model": _TEXT}
    return _object(head | {"choices": _list(_object(_CHOICE | choice)), "usage": _USAGE})


SCHEMAS: dict[str, Schema] = {
    "ChatCompletion": _generation("chat.completion", {"message": _MESSAGE}),
    "Completion": _generation("text_completion", {"text": _TEXT}),
    "EmbeddingList": _object(
        {"object": {"const": "list"}, "data": _list(_EMBEDDING), "model": _TEXT}
        | {"usage": _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT})}
    ),
    "Response": _object(
        {"id": _TEXT, "object": {"const": "response"}, "created_at": _COUNT, "model": _TEXT, "status": _TEXT}
        | {"output": _list({"type": "object"}), "usage": {"type": ["object", "null"]}}
    ),
    "DeletedResponse": _object({"id": _TEXT, "object": {"const": "response"}, "deleted": {"const": True}}),
    "ItemList": _object(
        {"object": {"const": "list"}, "data": _list({"type": "object"}), "has_more": {"type": "boolean"}}
    ),
    "MessageAnswer": _object(
        {"id": _TEXT, "type": {"const": "message"}, "role": {"const": "assistant"}, "model": _TEXT}
        | {"content": _list({"type": "object"}), "stop_reason": _TEXT, "usage": {"type": "object"}}
    ),
    "MessageTokens": _object({"input_tokens": _COUNT}),
    "Model": _object({"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT}),
    "ModelList": _object({"object": {"const": "list"}, "data": _list({"$ref": REF.format(model="Model")})}),
    "Tokens": _object({"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT)}),
    "Text": _object({"prompt": _TEXT}),
    "InputTokens": _object({"object": {"const": "response.input_tokens"}, "input_tokens": _COUNT}),
    "Status": _STATUS,
    "MessageError": _object({"type": {"const": "error"}, "error": _object({"type": _TEXT, "message": _TEXT})}),
    "Error": _object(
        {"error": _object({"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL})}
    ),
}
ANSWERS = {
    "/v1/chat/completions": "ChatCompletion",
    "/v1/chat/completions/input_tokens": "InputTokens",
    "/v1/completions": "Completion",
    "/v1/embeddings": "EmbeddingList",
    "/v1/responses": "Response",
    "/v1/responses/input_tokens": "InputTokens",
    "/v1/responses/{response_id}": "Response",
    "/v1/responses/{response_id}/cancel": "Response",
    "/v1/responses/{response_id}/input_items": "ItemList",
    "/v1/messages": "MessageAnswer",
    "/v1/messages/count_tokens": "MessageTokens",
    "/v1/models": "ModelList",
    "/v1/models/{model_id}": "Model",
    "/tokenize": "Tokens",
    "/detokenize": "Text",
    "/health": "Status",
    "/health/live": "Status",
    "/health/ready": "Status",
    "/health/progress": "Status",
}
"""Path -> what it answers with status 200; others answer plain text."""
_CHUNKS: Schema = {"schema": {}, "x-event": "data: one chunk as JSON; the last is data: [DONE]"}
_NAMED: Schema = {"schema": {}, "x-event": "event: the type of the document; data: one document as JSON"}
STREAMS = {
    "/v1/chat/completions": _CHUNKS,
    "/v1/completions": _CHUNKS,
    "/v1/responses": _NAMED,
    "/v1/messages": _NAMED,
}
"""Path -> the events that it answers where a stream is asked for."""


def _json(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": REF.format(model=name)}}}


def describe(schema: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose JSON body has this schema."""
    return {"requestBody": {"required": True, "content": _json(schema.__name__)}}


def _responses(path: str, method: str) -> Schema:
    content: Schema = _json(ANSWERS[path]) if path in ANSWERS else {"text/plain": {"schema": _TEXT}}
    if method == "delete":
        content = _json("DeletedResponse")
    if path in STREAMS:
        content["text/event-stream"] = STREAMS[path]
    return {
        "200": {"description": "Success", "content": content},
        "default": {"description": "An error", "content": _json("MessageError" if is_anthropic(path) else "Error")},
    }


def install(app: FastAPI) -> None:
    """Complete the document that FastAPI makes: the schemas of bodies and answers."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _, definitions = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas |= definitions["$defs"] | SCHEMAS
            for name in FASTAPI_ERRORS:
                schemas.pop(name, None)
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    operation["responses"] = _responses(path, method)
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]
