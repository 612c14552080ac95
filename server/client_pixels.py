"""Who has brought which pixels to the engine: each live image travels once, whatever number of sequences refer to it.

Part of step 3 of a request's path. Kept by `server/client.py`; API process. The engine keeps the pixels of a key while
a live sequence refers to it. What it may know less than this ledger are sequences that ended a moment ago: it then
answers PixelsMissing, and `missing` says what to send.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from server.errors import no_room_for_pixels, too_many_pixels
from server.generation import GenerationRequest

CHANNELS = 3


@dataclass(slots=True)
class _Key:
    carrier: int | None
    """A live sequence whose message brought this image and all its others, so that the engine takes it; None where
    there is none. A message that counts on others may be refused, and what it brought is dropped with it."""
    num_holders: int = 0
    """Live sequences that refer to the image."""
    is_brought: bool = False
    """It was sent to this engine."""


def _sizes(request: GenerationRequest) -> dict[bytes, int]:
    """Image key -> bytes of its pixels."""
    return {image.key: image.num_pixels * CHANNELS for image in request.images.images}


class PixelLedger:
    """Live sequences by image key. At most `limit` bytes of pixels are live, and at most that many on their way."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: dict[bytes, _Key] = {}
        self.num_bytes = 0
        """Of all live images together, each counted once."""
        self._unheard_bytes = 0
        """Sent since the engine last spoke, also for sequences that have ended meanwhile."""

    def require_room(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises Overloaded; BadRequest where the images would be too many even for an empty queue."""
        sizes = {key: size for request in requests for key, size in _sizes(request).items()}
        if (total := sum(sizes.values())) > self._limit:
            raise too_many_pixels(total, self._limit)
        new = sum(size for key, size in sizes.items() if key not in self._keys)
        held = max(self.num_bytes, self._unheard_bytes)
        if held + new > self._limit:
            raise no_room_for_pixels(held, new)

    def heard(self) -> None:
        """The engine spoke: it takes everything that has arrived before it speaks."""
        self._unheard_bytes = 0

    def engine_lost(self) -> None:
        """The next engine has no pixels."""
        self._unheard_bytes = 0
        for entry in self._keys.values():
            entry.carrier, entry.is_brought = None, False

    def add(self, request: GenerationRequest) -> None:
        """A sequence of this request lives from now on."""
        for key, size in _sizes(request).items():
            if key not in self._keys:
                self._keys[key] = _Key(carrier=None)
                self.num_bytes += size
            self._keys[key].num_holders += 1

    def first(self, seq_id: int, request: GenerationRequest) -> set[bytes]:
        """A live sequence is sent to an engine for the first time: the keys whose pixels it must bring."""
        return self._bring(seq_id, request, {key for key in _sizes(request) if not self._keys[key].is_brought})

    def missing(self, seq_id: int, request: GenerationRequest) -> set[bytes]:
        """The engine lacked an image of this live sequence, which is sent again: the keys whose pixels it must bring.
        Not those that have a carrier, which brought them since: its message comes first."""
        return self._bring(seq_id, request, {key for key in _sizes(request) if self._keys[key].carrier is None})

    def _bring(self, seq_id: int, request: GenerationRequest, brings: set[bytes]) -> set[bytes]:
        sizes = _sizes(request)
        for key in brings:
            entry = self._keys[key]
            entry.carrier, entry.is_brought = (seq_id if len(brings) == len(sizes) else None), True
            self._unheard_bytes += sizes[key]
        return brings

    def remove(self, seq_id: int, request: GenerationRequest) -> None:
        """The sequence has ended."""
        for key, size in _sizes(request).items():
            entry = self._keys[key]
            entry.num_holders -= 1
            if not entry.num_holders:
                del self._keys[key]
                self.num_bytes -= size
            elif entry.carrier == seq_id:
                entry.carrier = None
