"""A gateway over the scripted engine on a real socket, served by this process as the API process serves it."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from server.http_protocol import bounded_protocol

START_SECONDS = 10.0


@contextlib.contextmanager
def serve_app(app: FastAPI, *, max_head_bytes: int = 65_536, head_timeout: float = 30.0) -> Iterator[str]:
    """The base URL; the server ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app,
            http=bounded_protocol(max_head_bytes, head_timeout),
            ws="none",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            deadline = time.monotonic() + START_SECONDS
            while not server.started:
                assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(START_SECONDS)
            assert not thread.is_alive()
