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
def serve_app(
    app: FastAPI, *, max_head_bytes: int = 65_536, patience: float = 30.0, send_buffer: int | None = None
) -> Iterator[str]:
    """The base URL; the server ends with the block. `send_buffer` is in bytes: what the system takes for a client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        config = uvicorn.Config(
            app,
            http=bounded_protocol(max_head_bytes, patience),
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
