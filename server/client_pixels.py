"""Who has brought which pixels to which engine: each live image travels once to an engine, whatever number of its
sequences refer to it.

Part of step 3 of a request's path. Kept by `server/client.py`; API process. An engine keeps the pixels of a key while a
live sequence of its own refers to it. What it may know less than this ledger are sequences that ended a moment ago: it
then answers PixelsMissing, and `missing` says what to send.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from server.errors import no_room_for_pixels, too_many_pixels
from server.generation import GenerationRequest

CHANNELS = 3


@dataclass(slots=True)
class _Sent:
    """An image whose pixels were sent to an engine."""

    carrier: int | None = None
    """A live sequence whose message brought this image and all its others, so that the engine takes it; None where
    there is none. A message that counts on others may be refused, and what it brought is dropped with it."""
    num_holders: int = 0
    """Live sequences of this engine that refer to the image."""


def _sizes(request: GenerationRequest) -> dict[bytes, int]:
    """Image key -> bytes of its pixels."""
    return {image.key: image.num_pixels * CHANNELS for image in request.images.images}


class PixelLedger:
    """Live sequences by image key. At most `limit` bytes of pixels are live, and at most that many on their way; an
    engine is named by its generation."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._holders: Counter[bytes] = Counter()
        """Live sequences by key, wherever they are."""
        self.num_bytes = 0
        """Of all live images together, each counted once."""
        self._sent: dict[int, dict[bytes, _Sent]] = {}
        """By engine and key."""
        self._unheard_bytes: Counter[int] = Counter()
        """Sent since the engine last spoke, also for sequences that have ended meanwhile."""

    def require_room(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises Overloaded; BadRequest where the images would be too many even for an empty queue."""
        sizes = {key: size for request in requests for key, size in _sizes(request).items()}
        if (total := sum(sizes.values())) > self._limit:
            raise too_many_pixels(total, self._limit)
        new = sum(size for key, size in sizes.items() if key not in self._holders)
        held = max(self.num_bytes, self._unheard_bytes.total())
        if held + new > self._limit:
            raise no_room_for_pixels(held, new)

    def heard(self, engine: int) -> None:
        """The engine spoke: it takes everything that has arrived before it speaks."""
        del self._unheard_bytes[engine]

    def engine_lost(self, engine: int) -> None:
        """Its pixels are lost with it."""
        self._sent.pop(engine, None)
        self.heard(engine)

    def add(self, request: GenerationRequest) -> None:
        """A sequence of this request lives from now on."""
        for key, size in _sizes(request).items():
            self.num_bytes += 0 if key in self._holders else size
            self._holders[key] += 1

    def first(self, seq_id: int, request: GenerationRequest, engine: int) -> set[bytes]:
        """A live sequence is sent to this engine for the first time: the keys whose pixels it must bring."""
        sent = self._sent.setdefault(engine, {})
        brings = _sizes(request).keys() - sent.keys()
        for key in _sizes(request):
            sent.setdefault(key, _Sent()).num_holders += 1
        return self._bring(seq_id, request, engine, brings)

    def missing(self, seq_id: int, request: GenerationRequest, engine: int) -> set[bytes]:
        """The engine lacked an image of this live sequence, which is sent again: the keys whose pixels it must bring.
        Not those that have a carrier, which brought them since: its message comes first."""
        sent = self._sent[engine]
        return self._bring(seq_id, request, engine, {key for key in _sizes(request) if sent[key].carrier is None})

    def _bring(self, seq_id: int, request: GenerationRequest, engine: int, brings: set[bytes]) -> set[bytes]:
        sizes = _sizes(request)
        for key in brings:
            self._sent[engine][key].carrier = seq_id if len(brings) == len(sizes) else None
            self._unheard_bytes[engine] += sizes[key]
        return brings

    def remove(self, seq_id: int, request: GenerationRequest, engine: int) -> None:
        """The sequence has ended, which this engine had, if there is one."""
        sent = self._sent.get(engine)
        for key, size in _sizes(request).items():
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.num_bytes -= size
            if sent is not None:
                _leave(sent, key, seq_id)


def _leave(sent: dict[bytes, _Sent], key: bytes, seq_id: int) -> None:
    """One sequence less refers to the image there."""
    entry = sent[key]
    entry.num_holders -= 1
    if not entry.num_holders:
        del sent[key]
    elif entry.carrier == seq_id:
        entry.carrier = None
