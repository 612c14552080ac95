"""The outermost layer of the gateway: request ids, the access log, and the last net for faults of ours.

Pure ASGI, installed by `server/app.py`; API process. It keeps one `RequestRecord` for each request, which the routes
fill with what only they know.
"""

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass, field

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.dialect import error_body, id_headers
from server.errors import ApiError, InternalError, Unavailable

logger = logging.getLogger("firstlight.access")
_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
CLIENT_GONE = 499


def is_sane_id(text: str) -> bool:
    """Whether a client's request id may be echoed and logged."""
    return _SANE_ID.fullmatch(text) is not None


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What the access log says about a request. Stands in the ASGI scope's state under 'record'."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    """Of the response, 0 before it started."""
    client_gone: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0


def error_response_messages(error: ApiError, scope: Scope) -> list[Message]:
    """The ASGI messages of an error answer, for places that have no route."""
    return error_messages(error, error_body(error, scope["path"], scope["state"]["record"].request_id))


def error_messages(error: ApiError, document: dict[str, object]) -> list[Message]:
    """The ASGI messages of an error answer with this body."""
    body = msgspec.json.encode(document)
    headers = error.headers() | {"content-type": "application/json", "content-length": str(len(body))}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return [
        {"type": "http.response.start", "status": error.status, "headers": raw},
        {"type": "http.response.body", "body": body},
    ]


class RequestContext:
    """Gives each request an id and a record, logs one line, and turns an unhandled exception into a plain 500."""

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self._app, self._access_log = app, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        record = RequestRecord(request_id=given if is_sane_id(given) else uuid.uuid4().hex)
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if record.client_gone:
                return
            if message["type"] == "http.response.start":
                record.status = message["status"]
                for name in id_headers(scope["path"]):
                    MutableHeaders(scope=message)[name] = record.request_id
            try:
                await send(message)
            except OSError:
                record.client_gone = True
                raise

        try:
            await self._app(_as_get(scope), receive, send_with_id)
        except asyncio.CancelledError:  # the server ends and waits no more for the client; it logs how many these are
            await _fail(scope, record, send_with_id, Unavailable("the server is shutting down"))
        except OSError:
            if not record.client_gone:
                logger.exception("request %s failed", record.request_id)
                await _fail(scope, record, send_with_id)
        except Exception:
            logger.exception("request %s failed", record.request_id)
            await _fail(scope, record, send_with_id)
        finally:
            if self._access_log:
                _log(scope, record)


def _as_get(scope: Scope) -> Scope:
    """HEAD goes the way of GET; the server leaves the body out, by the scope that it keeps."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


async def _fail(scope: Scope, record: RequestRecord, send: Send, error: ApiError | None = None) -> None:
    if not record.status:
        for message in error_response_messages(error or InternalError("The server had an error."), scope):
            await send(message)


def _log(scope: Scope, record: RequestRecord) -> None:
    status = CLIENT_GONE if record.client_gone else record.status
    milliseconds = (time.monotonic() - record.started) * 1000
    logger.info(
        "%s %s %d %.1fms in=%d out=%d id=%s",
        scope["method"],
        scope["path"].encode("unicode_escape").decode("ascii")[:200],
        status,
        milliseconds,
        record.prompt_tokens,
        record.completion_tokens,
        record.request_id,
    )
