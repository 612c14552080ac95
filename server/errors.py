"""Errors caused from outside, and the one table that turns them into HTTP answers.

Raised anywhere in the API process; rendered by the exception handlers of `server/app.py` and, after the headers are
sent, as the error event of a stream (`server/api/sse.py`). Broken invariants are not here: they are assertions.
"""

from scheduler.request import FinishReason, NeverFits, QueueFull
from server.grammar.errors import GrammarError
from vision.errors import ImageError, ImageTooLarge

MAX_MESSAGE = 300
"""Characters of an error message: what the client sent is never echoed at length."""


class ApiError(Exception):
    """An error with an OpenAI-style body. `param` names the offending field; `code` is machine-readable."""

    status = 400
    type = "invalid_request_error"
    retry_after: int | None = None
    """Seconds after which to come again."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        details: dict[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        self.param, self.code = param, code
        self.details = details or {}

    def body(self) -> dict[str, object]:
        """`{"error": {"message", "type", "param", "code", ...details}}`."""
        error: dict[str, object] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error | self.details}

    def headers(self) -> dict[str, str]:
        """Response headers beside the content type."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


class BadRequest(ApiError):
    """400: the client can mend it."""


class DeadEnd(ApiError):
    """400: an output came to where its grammar and the request's bans leave no token."""


class Unauthorized(ApiError):
    """401: no API key, or a wrong one."""

    status = 401

    def headers(self) -> dict[str, str]:
        """Names the scheme, as RFC 9110 demands."""
        return {"www-authenticate": "Bearer"}


class NotFound(ApiError):
    """404: no such model or path."""

    status = 404


class MethodNotAllowed(ApiError):
    """405: the path exists, the method does not."""

    status = 405


class DeadlineExceeded(ApiError):
    """408: the request's time is over; retrying may help."""

    status = 408
    type = "timeout_error"


class BodyTooLarge(ApiError):
    """413: the body, or an image in it, exceeds a configured limit."""

    status = 413


class UnsupportedMediaType(ApiError):
    """415: the body is not declared as JSON, or is compressed."""

    status = 415


class HeadTooLarge(ApiError):
    """431: request line and headers exceed the configured limit."""

    status = 431


class ClientGone(ApiError):
    """499: nobody is left to answer; only the access log sees it."""

    status = 499


class Overloaded(ApiError):
    """429: the queue is full. Always says when to come again."""

    status = 429
    type = "rate_limit_error"
    retry_after = 1

    def __init__(self, message: str) -> None:
        super().__init__(message, code="server_overloaded")


class InternalError(ApiError):
    """500: a fault of ours; the message never carries internals."""

    status = 500
    type = "server_error"


class Unavailable(ApiError):
    """503: loading, draining, or the engine died. Always says when to come again."""

    status = 503
    type = "server_error"
    retry_after = 2

    def __init__(self, message: str) -> None:
        super().__init__(message, code="service_unavailable")


def context_overflow(prompt_tokens: int, max_model_len: int, *, param: str = "messages") -> BadRequest:
    """The 400 for a prompt that is too long, or as long as the model, in the words that clients search for."""
    reason = ", which leaves no room for output tokens" if prompt_tokens <= max_model_len else ""
    return BadRequest(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
        f"{prompt_tokens} input tokens{reason}. Please reduce the length of the {param}.",
        param=param,
        code="context_length_exceeded",
        details={"n_prompt_tokens": prompt_tokens, "n_ctx": max_model_len},
    )


def from_image(error: ImageError, number: int) -> ApiError:
    """The error for a request whose image of that number, from 1, cannot be used. All are the client's: it chose the
    place too, when a fetch fails."""
    kind = BodyTooLarge if isinstance(error, ImageTooLarge) else BadRequest
    return kind(f"Image {number}: {error}", param="messages", code=error.kind)


def too_many_images(count: int, limit: int) -> BadRequest:
    """The 400 for a request with more images than it may have."""
    return BadRequest(
        f"The request has {count} images; the limit is {limit} in one request.",
        param="messages",
        code="too_many_images",
    )


def too_many_pixels(num_bytes: int, limit: int) -> BadRequest:
    """The 400 for a request whose images even an empty queue would not hold."""
    return BadRequest(
        f"The images have {num_bytes} bytes when they are decoded and resized; {limit} is the limit for all requests "
        "together.",
        param="messages",
    )


def no_room_for_pixels(held: int, more: int) -> Overloaded:
    """The 429 for a request whose images do not fit beside those of others."""
    return Overloaded(f"the images of other requests have {held} bytes, which leaves no room for {more} more")


def from_engine(kind: str | None, message: str) -> ApiError | None:
    """The error for a sequence that the engine refused or ended, `kind` being the name of the refusal or the finish
    reason; None for a reason that clients are told as such."""
    error = _FROM_ENGINE.get(kind)
    return None if error is None else error(message)


_FROM_ENGINE: dict[str | None, type[ApiError]] = {
    NeverFits.__name__: BadRequest,
    QueueFull.__name__: Overloaded,
    GrammarError.__name__: BadRequest,
    FinishReason.DEAD_END: DeadEnd,
    FinishReason.TIMEOUT: DeadlineExceeded,
    FinishReason.ERROR: InternalError,
    FinishReason.ABORT: Unavailable,
}
