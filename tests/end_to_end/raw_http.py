"""Many simultaneous requests from one thread over plain sockets: the client shares its cores with the server."""

import json
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Exchange:
    """One request on a connection of its own."""

    path: str
    body: bytes
    drop_after: int | None = None
    """Close the connection when this many events have come; None: read to the end."""
    data: bytearray = field(default_factory=bytearray)
    sent_at: float = 0.0
    first_byte_at: float = 0.0

    @property
    def status(self) -> int:
        return int(self.data[9:12] or 0)

    @property
    def events(self) -> int:
        """Events that have come so far."""
        return self.data.count(b"data: ")

    @property
    def headers(self) -> dict[str, str]:
        lines = bytes(self.data).split(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}

    @property
    def seconds(self) -> float:
        """From sending to the first byte of the answer."""
        return self.first_byte_at - self.sent_at

    def wire(self) -> bytes:
        head = f"POST {self.path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json\r\n"
        return head.encode() + b"content-length: %d\r\n\r\n" % len(self.body) + self.body


def exchange(path: str, drop_after: int | None = None, **body: object) -> Exchange:
    return Exchange(path, json.dumps(body).encode(), drop_after)


def run_all(url: str, exchanges: list[Exchange], seconds: float) -> None:
    """Send all at once and read until each has ended or was dropped; those that want no event are dropped as soon as
    any other has one, or nobody else is left."""
    host, port = url.removeprefix("http://").split(":")
    poll = select.epoll()
    live: dict[int, tuple[socket.socket, Exchange]] = {}
    for entry in exchanges:
        connection = socket.create_connection((host, int(port)), timeout=seconds)
        live[connection.fileno()] = (connection, entry)
    for number, (connection, entry) in live.items():
        entry.sent_at = time.monotonic()
        connection.sendall(entry.wire())
        poll.register(number, select.EPOLLIN)

    def drop(wanted: Callable[[Exchange], bool]) -> None:
        for number, (connection, entry) in list(live.items()):
            if wanted(entry):
                del live[number]
                poll.unregister(number)
                connection.close()

    deadline = time.monotonic() + seconds
    try:
        while live:
            assert time.monotonic() < deadline, f"{len(live)} answers did not end within {seconds} s"
            for number, _ in poll.poll(0.5):
                connection, entry = live[number]
                received = connection.recv(1 << 16)
                entry.first_byte_at = entry.first_byte_at or time.monotonic()
                entry.data += received
                if not received or (entry.drop_after is not None and entry.events >= entry.drop_after > 0):
                    drop(lambda other, entry=entry: other is entry)  # type: ignore[misc]
            if any(entry.events for entry in exchanges) or all(entry.drop_after == 0 for _, entry in live.values()):
                drop(lambda entry: entry.drop_after == 0)
    finally:
        drop(lambda entry: True)
        poll.close()


def waited_for_a_core(pid: int) -> float:
    """Seconds in which the process's main thread could have run, but other processes had the cores."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
