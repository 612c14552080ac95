"""The health routes on a port of their own, answered in the supervisor process: neither the event loop of the API
process nor its interpreter can keep a probe waiting.

The API process reports its health several times a second (`wire.Health`), and a report that does not come says that it
is blocked, stopped or gone. Owned by `server/supervisor.py`; the threads here only read the newest report.
"""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from server import wire
from server.health import LIVE, progress
from server.options import OptionError

MAX_CONNECTIONS = 16
CONNECTION_SECONDS = 5.0
"""In which a probe must send its request and take its answer."""

Answer = tuple[int, dict[str, Any]]


class HealthBoard:
    """The newest report, and what it means now. Written by the supervisor's loop, read by threads."""

    def __init__(self, stall_timeout: float) -> None:
        self._stall_timeout = stall_timeout
        self._newest: tuple[float, wire.Health] = (
            time.monotonic(),
            wire.Health("the server is starting", False, (None,)),
        )

    def hear(self, report: wire.Health) -> None:
        """The API process said how it is."""
        self._newest = time.monotonic(), report

    def answer(self, path: str) -> Answer | None:
        """(status, document) of a health route; None for another path."""
        heard_at, report = self._newest
        silence = time.monotonic() - heard_at
        reason = report.unready
        if silence > self._stall_timeout:
            reason = f"the API process has given no sign of life for {silence:.0f} s"
        if path == "/health/live":
            return (503, {"status": "stuck", "reason": reason}) if silence > self._stall_timeout else (200, LIVE)
        if path in ("/health", "/health/ready"):
            if reason is not None:
                return 503, {"status": "unready", "reason": reason}
            return 200, {"status": "overloaded" if report.overloaded else "ok"}
        if path == "/health/progress":
            return 200, progress(report.replicas)
        return None


class _Handler(BaseHTTPRequestHandler):
    timeout = CONNECTION_SECONDS
    server: "HealthServer"

    def do_GET(self) -> None:
        status, document = self.server.board.answer(self.path.partition("?")[0]) or (404, {"status": "unknown path"})
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes are not logged."""


class HealthServer(ThreadingHTTPServer):
    """Listens from construction on, in a thread; a thread for each of at most MAX_CONNECTIONS connections."""

    daemon_threads = True
    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(self, host: str, port: int, board: HealthBoard) -> None:
        """Raises OptionError where it cannot listen."""
        self.board = board
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise OptionError(f"cannot listen on {host} port {port} (health_port): {error.strerror}") from None
        threading.Thread(target=self.serve_forever, daemon=True, name="health").start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """One more than MAX_CONNECTIONS is closed at once."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In a thread of its own."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A probe that left, or took too long, has its own log."""
