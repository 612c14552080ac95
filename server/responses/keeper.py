"""One response while it is being made: its document, and its place in the store. API process.

Made by the routes of `server/responses` before anything is computed, so that what cannot be kept is refused first;
brought up to date by the renderer.
"""

from server.responses.document import Document
from server.responses.store import RUNNING, ResponseStore


class Keeper:
    """Without a store, nothing is kept."""

    def __init__(self, store: ResponseStore | None, tenant: bytes, document: Document, items: list[Document]) -> None:
        """Raises BadRequest or Overloaded where the store cannot take it."""
        self._store, self._tenant = store, tenant
        self.document = document
        """As it is now."""
        self.is_known = False
        """The client has been told of the response: it is kept whatever becomes of it."""
        self.stored = None if store is None else store.add(tenant, document, items)

    @property
    def is_running(self) -> bool:
        """Whether the response has not ended."""
        return self.document["status"] in RUNNING

    def update(self, document: Document) -> None:
        """The response has changed."""
        self.document = document
        if self._store is not None and self.stored is not None:
            self._store.update(self._tenant, self.stored, document)

    def end(self, document: Document) -> None:
        """The response has ended otherwise than it should; nobody will ask for one that nobody knows."""
        self.update(document)
        if not self.is_known and self._store is not None:
            self._store.discard(self._tenant, document["id"])
