"""Work that is worth doing only while the client is there. Used by the generation routes; API process.

Whatever ASGI version the server speaks, `http.disconnect` is waited for here, so that a request that sits in the queue
or in prefill is cancelled as fast as one that is streaming.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from server.errors import ClientGone
from server.middleware import RequestRecord

T = TypeVar("T")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, record: RequestRecord, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ClientGone when the client goes first; the work is then cancelled and has ended.
    The request's body must have been read."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        record.client_gone = True
        raise ClientGone("The client closed the connection.")
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)
