"""Which API a path belongs to, where that matters to answers that have no route: errors, and the names of headers.

Used by the middleware, the door and the exception handlers of `server/app.py`; API process. Paths of Anthropic's API
answer in its words, all others in OpenAI's.
"""

from server.errors import ApiError

ANTHROPIC = "/v1/messages"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""By status; others are invalid_request_error."""


def is_anthropic(path: str) -> bool:
    """Whether the path belongs to Anthropic's API."""
    return path == ANTHROPIC or path.startswith(ANTHROPIC + "/")


def error_body(error: ApiError, path: str, request_id: str) -> dict[str, object]:
    """The body of an error answer."""
    return anthropic_error(error, request_id) if is_anthropic(path) else error.body()


def anthropic_error(error: ApiError, request_id: str) -> dict[str, object]:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`"""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def id_headers(path: str) -> tuple[str, ...]:
    """The response headers that carry the request's id."""
    return ("x-request-id", "request-id") if is_anthropic(path) else ("x-request-id",)
