"""API keys: who may use the routes, and whose data is whose. Pure ASGI, installed by `server/app.py`; API process.

A key comes as `Authorization: Bearer KEY`, or in `x-api-key` as Anthropic's clients send it. What the server keeps for
a client is kept under its *tenant*, a digest of the key; without configured keys all clients are one tenant.
"""

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import Unauthorized
from server.middleware import error_response_messages

OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/health/progress")
"""Probes carry no keys."""
ANYBODY = b""
"""The tenant of everybody, where no keys are configured."""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key_in(headers: Headers) -> str:
    """The key that the request comes with, or an empty string."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else headers.get("x-api-key", "")


class Authentication:
    """Refuses requests without one of the configured keys. With no keys configured it lets everything pass. Routes find
    the tenant in the scope's state, under 'tenant'."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN_PATHS:
            scope.setdefault("state", {})["tenant"] = ANYBODY
            await self._app(scope, receive, send)
            return
        key = _key_in(Headers(scope=scope))
        if self.accepts(key):
            scope["state"]["tenant"] = _digest(key)
            await self._app(scope, receive, send)
            return
        message = (
            "Incorrect API key provided." if key else "You didn't provide an API key: send Authorization: Bearer KEY."
        )
        for part in error_response_messages(Unauthorized(message, code="invalid_api_key"), scope):
            await send(part)

    def accepts(self, key: str) -> bool:
        """Compares with every key, in a time that does not depend on the keys."""
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)
