"""API keys: who may use the routes. Pure ASGI, installed by `server/app.py`; API process."""

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import Unauthorized
from server.middleware import error_response_messages

OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/health/progress")
"""Probes carry no keys."""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Authentication:
    """Refuses requests without one of the configured keys. With no keys configured it lets everything pass."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.accepts(key.strip()):
            await self._app(scope, receive, send)
            return
        message = (
            "Incorrect API key provided." if key else "You didn't provide an API key: send Authorization: Bearer KEY."
        )
        for part in error_response_messages(Unauthorized(message, code="invalid_api_key")):
            await send(part)

    def accepts(self, key: str) -> bool:
        """Compares with every key, in a time that does not depend on the keys."""
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)
