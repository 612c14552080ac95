"""The response object of the Responses API. Used by `server/responses/render.py`; API process."""

import time
from typing import Any
from uuid import uuid4

from server.errors import ApiError
from server.schema.responses import ResponsesBody
from server.stream import Usage

Document = dict[str, Any]

_TEXT_FORMAT = {"type": "text"}
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def new_response(body: ResponsesBody) -> Document:
    """A response of which nothing has been made yet."""
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.keeps,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": (body.text.format if body.text else None) or _TEXT_FORMAT},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


def completed(response: Document, output: list[Document], usage: Usage, *, is_cut: bool) -> Document:
    """The response with its output; `is_cut` where max_output_tokens or the model's length ended it."""
    return response | {
        "status": "incomplete" if is_cut else "completed",
        "completed_at": None if is_cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": _usage(usage),
    }


def failed(response: Document, output: list[Document], error: ApiError) -> Document:
    """The response, which an error has ended."""
    reason = {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}
    return response | {"status": "failed", "output": output, "error": reason}


def _usage(usage: Usage) -> Document:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
