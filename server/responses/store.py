"""Responses that are kept for later requests: in memory, under limits, each visible to its tenant alone.

Owned by the gateway, used by the routes of `server/responses`; API process. When a limit is reached, a tenant's oldest
finished response makes room; while memory is scarce, the oldest of all tenants do. What is kept ends with the process.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from server.errors import BadRequest, NotFound, Overloaded

RUNNING = ("queued", "in_progress")


class Cancellable(Protocol):
    """Work that can be ended before its time."""

    async def cancel(self) -> None:
        """End it; returns when it has ended."""
        ...


@dataclass(slots=True, kw_only=True)
class Stored:
    """One response."""

    document: dict[str, Any]
    """As it would be answered now."""
    items: list[dict[str, Any]]
    """The conversation up to it, earlier responses included."""
    expires: float
    """On the store's clock."""
    item_bytes: int
    num_bytes: int = 0
    work: Cancellable | None = None
    """What makes it in the background."""

    @property
    def is_running(self) -> bool:
        """Whether it may still change."""
        return self.document["status"] in RUNNING


@dataclass(slots=True)
class _Shelf:
    """What a tenant has, oldest first."""

    responses: dict[str, Stored] = field(default_factory=dict)
    num_bytes: int = 0


class ResponseStore:
    """The limits are those of each tenant."""

    def __init__(
        self, *, max_count: int, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_count, self._max_bytes, self._seconds, self._clock = max_count, max_bytes, seconds, clock
        self._shelves: dict[bytes, _Shelf] = {}

    def add(self, tenant: bytes, document: dict[str, Any], items: list[dict[str, Any]]) -> Stored:
        """Keep a response that has begun. Raises BadRequest for one that is too large, Overloaded while all that are
        kept are unfinished."""
        item_bytes = len(msgspec.json.encode(items))
        if item_bytes > self._max_bytes:
            raise BadRequest(
                f"The input has {item_bytes} bytes; at most {self._max_bytes} are kept. Send store: false.",
                param="store",
            )
        shelf = self._shelves.setdefault(tenant, _Shelf())
        self._drop_expired(shelf)
        stored = Stored(document=document, items=items, expires=self._clock() + self._seconds, item_bytes=item_bytes)
        if not self._make_room(shelf, item_bytes, 1):
            raise Overloaded("all the responses that are kept for this key are still being worked on")
        shelf.responses[document["id"]] = stored
        self._weigh(shelf, stored)
        return stored

    def update(self, tenant: bytes, stored: Stored, document: dict[str, Any]) -> None:
        """The response has changed. One that has grown beyond all limits is not kept."""
        stored.document = document
        shelf = self._shelves.get(tenant)
        if shelf is None or shelf.responses.get(document["id"]) is not stored:
            return
        self._weigh(shelf, stored)
        if shelf.num_bytes > self._max_bytes:
            self._make_room(shelf, 0, 0)

    def get(self, tenant: bytes, response_id: str, *, param: str | None = None) -> Stored:
        """Raises NotFound, also for what belongs to somebody else."""
        shelf = self._shelves.get(tenant)
        if shelf is not None:
            self._drop_expired(shelf)
            if (stored := shelf.responses.get(response_id)) is not None:
                return stored
        raise NotFound(f"Response with id '{response_id[:100]}' not found.", param=param, code="response_not_found")

    def delete(self, tenant: bytes, response_id: str) -> None:
        """Raises NotFound; BadRequest for one that is being worked on."""
        if self.get(tenant, response_id).is_running:
            raise BadRequest("The response is still being worked on; cancel it first.", param="response_id")
        self.discard(tenant, response_id)

    def discard(self, tenant: bytes, response_id: str) -> None:
        """Keep it no more; it may be gone already."""
        shelf = self._shelves.get(tenant)
        if shelf is not None and response_id in shelf.responses:
            self._remove(shelf, response_id)

    def relieve(self) -> None:
        """Drop the older half of what is finished, whoever has it: memory is scarce."""
        finished = [
            (stored.expires, tenant, key)
            for tenant, shelf in self._shelves.items()
            for key, stored in shelf.responses.items()
            if not stored.is_running
        ]
        for _, tenant, key in sorted(finished)[: (len(finished) + 1) // 2]:
            self._remove(self._shelves[tenant], key)

    def _weigh(self, shelf: _Shelf, stored: Stored) -> None:
        size = stored.item_bytes + len(msgspec.json.encode(stored.document))
        shelf.num_bytes += size - stored.num_bytes
        stored.num_bytes = size

    def _make_room(self, shelf: _Shelf, num_bytes: int, count: int) -> bool:
        """Drop finished responses, the oldest first, until so much more fits."""
        while len(shelf.responses) + count > self._max_count or shelf.num_bytes + num_bytes > self._max_bytes:
            oldest = next((key for key, stored in shelf.responses.items() if not stored.is_running), None)
            if oldest is None:
                return False
            self._remove(shelf, oldest)
        return True

    def _drop_expired(self, shelf: _Shelf) -> None:
        now = self._clock()
        for key in [key for key, stored in shelf.responses.items() if stored.expires < now and not stored.is_running]:
            self._remove(shelf, key)

    def _remove(self, shelf: _Shelf, response_id: str) -> None:
        shelf.num_bytes -= shelf.responses.pop(response_id).num_bytes
