"""The OpenAPI document: the schemas of bodies that routes read themselves. Used by `server/app.py`; API process."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.schema.chat import ChatBody
from server.schema.completions import CompletionBody
from server.schema.tokens import DetokenizeBody, TokenizeBody

REF = "#/components/schemas/{model}"
BODIES: tuple[type[BaseModel], ...] = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe(schema: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose JSON body has this schema."""
    content = {"application/json": {"schema": {"$ref": REF.format(model=schema.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def install(app: FastAPI) -> None:
    """Complete the document that FastAPI makes: the schemas of the bodies, and that any route may answer an error."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _, definitions = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF)
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components |= definitions["$defs"] | {"Error": _ERROR}
            error = {"application/json": {"schema": {"$ref": REF.format(model="Error")}}}
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"]["default"] = {"description": "An error", "content": error}
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]
