"""A response that is made while nobody waits for it. Made by the routes of `server/responses`; API process."""

import asyncio
import logging
from functools import partial

from server.errors import ApiError
from server.responses.render import ResponseRenderer
from server.stream import Generation

logger = logging.getLogger(__name__)


class BackgroundWork:
    """Runs a generation to its end; what comes of it is kept by the renderer. Holds neither when it has ended."""

    def __init__(self, generation: Generation, renderer: ResponseRenderer) -> None:
        self._task: asyncio.Task[object] | None = asyncio.get_running_loop().create_task(renderer.document(generation))
        self._task.add_done_callback(partial(self._ended, generation, renderer))

    def _ended(self, generation: Generation, renderer: ResponseRenderer, task: "asyncio.Task[object]") -> None:
        self._task = None
        generation.close()
        renderer.close()
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, ApiError):
            logger.error("a response in the background failed", exc_info=error)

    async def cancel(self) -> None:
        """End it; returns when it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
