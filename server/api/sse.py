"""Server-sent events: a stream of chunks as an HTTP answer. Used by the generation routes; API process.

Nothing is sent before the first chunk exists, so that errors up to then have their own HTTP status; later ones become
an error event. Every stream that still has a reader ends as its API says (`[DONE]` for OpenAI's chunks).
"""

import logging
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.disconnect import while_connected
from server.api.render import Renderer
from server.errors import ApiError, ClientGone, InternalError
from server.middleware import RequestRecord
from server.stream import Generation

logger = logging.getLogger(__name__)

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class EventStream(Response):
    """Sends the chunks of a generation as they come; the generation is closed when the client or the stream ends."""

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        record: RequestRecord,
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers=HEADERS | headers)
        del self.headers["content-length"]
        self._generation, self._renderer, self._record = generation, renderer, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry. Raises ApiError as long as nothing was sent."""
        try:
            await while_connected(receive, self._record, self._send_all(send))
        except (ClientGone, OSError):
            self._record.client_gone = True
        finally:
            self._generation.close()
            self._renderer.close()
            usage = self._generation.usage()
            self._record.prompt_tokens = usage.prompt_tokens
            self._record.completion_tokens = usage.completion_tokens

    async def _send_all(self, send: Send) -> None:
        started = False

        async def put(chunk: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

        try:
            async with aclosing(self._renderer.chunks(self._generation)) as chunks:
                async for chunk in chunks:
                    await put(chunk)
        except OSError:
            raise
        except Exception as error:
            if not started:
                raise
            await put(self._renderer.failure(self._public(error)))
        await send({"type": "http.response.body", "body": self._renderer.last, "more_body": False})

    def _public(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        logger.error("request %s failed in mid-stream", self._record.request_id, exc_info=error)
        return InternalError("The server had an error.")
