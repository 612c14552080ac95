"""Requests that have made engines crash, which are not tried again for a while.

Kept by `server/client.py`; API process.
"""

import hashlib
import time
from collections import OrderedDict

from server.errors import BadRequest
from server.generation import GenerationRequest

QUARANTINE_SECONDS = 600.0
MAX_QUARANTINED = 256
"""The oldest are forgotten first."""


def fingerprint(request: GenerationRequest) -> bytes:
    """Equal for requests that an engine computes alike: what is read, and what comes of it."""
    digest = hashlib.sha256(request.prompt_ids.tobytes())
    for image in request.images.images:
        digest.update(image.key)
    digest.update((request.pooling or "").encode())
    if (grammar := request.sampling.grammar) is not None:
        digest.update(grammar.source.encode())
    return digest.digest()


class Quarantine:
    """Fingerprints, and until when each is refused."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, request: GenerationRequest) -> None:
        """Refuse requests like this one for QUARANTINE_SECONDS."""
        key = fingerprint(request)
        self._until[key] = time.monotonic() + QUARANTINE_SECONDS
        self._until.move_to_end(key)
        if len(self._until) > MAX_QUARANTINED:
            self._until.popitem(last=False)

    def refuse(self, requests: list[GenerationRequest]) -> None:
        """Raises BadRequest for a request like one in quarantine."""
        while self._until and next(iter(self._until.values())) <= time.monotonic():
            self._until.popitem(last=False)
        if self._until and any(fingerprint(request) in self._until for request in requests):
            raise BadRequest(
                "A request like this one has repeatedly made the engine crash. It is refused for some minutes; "
                "please report it.",
                code="request_quarantined",
            )
