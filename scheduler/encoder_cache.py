"""Which images' embeddings the runtime keeps, under which slot. Owned by `images.ImagePlanner`, engine process.

The tensors are the runtime's: it learns from the plan what to encode and what to forget. An entry is pinned once for
each image of a running sequence that still needs it; those without pins stay until their memory is needed.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from scheduler.plan import ints


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLimits:
    """What the model and the machine's memory allow; facts that are learned while loading."""

    cache_bytes: int = 0
    """Memory for embeddings; no image may need more."""
    bytes_per_embedding: int = 0
    """0: a model without images."""
    max_image_pixels: int = 2**31 - 1
    """That the tower may be given for one image."""
    whole_spans: bool = False
    """Attention within an image goes in both directions: no step may compute a part of a span only."""
    adapted: bool = False
    """The model has an adapter for sequences with images."""


NO_ENCODER = EncoderLimits()


@dataclass(slots=True)
class _Entry:
    slot: int
    num_bytes: int
    pins: int


class EncoderCache:
    """At most `limits.cache_bytes` of embeddings by image key."""

    def __init__(self, limits: EncoderLimits) -> None:
        self._limits = limits
        self._entries: dict[bytes, _Entry] = {}
        # Those without pins, the one that lost its last pin longest ago first.
        self._unused: OrderedDict[bytes, None] = OrderedDict()
        self._unused_bytes = 0
        self._free_slots: list[int] = []
        self._drops = ints()
        self.num_bytes = 0

    def bytes_for(self, num_embeddings: int) -> int:
        """Memory of an image."""
        return num_embeddings * self._limits.bytes_per_embedding

    def slot(self, key: bytes) -> int:
        """Where the image's embeddings are; it must be here."""
        return self._entries[key].slot

    def pin(self, key: bytes) -> bool:
        """Keep an image until `unpin`; False if it is not here."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        if entry.pins == 0:
            del self._unused[key]
            self._unused_bytes -= entry.num_bytes
        entry.pins += 1
        return True

    def unpin(self, key: bytes) -> None:
        """One need fewer; after the last one the image may be evicted."""
        entry = self._entries[key]
        assert entry.pins > 0, "an image was unpinned more often than it was pinned"
        entry.pins -= 1
        if entry.pins == 0:
            self._unused[key] = None
            self._unused_bytes += entry.num_bytes

    def insert(self, key: bytes, num_embeddings: int) -> int | None:
        """A slot for an image that is not here, pinned once; None if pinned ones leave too little room. Evicts unused
        ones, oldest first."""
        assert key not in self._entries, "an image is encoded twice"
        num_bytes = self.bytes_for(num_embeddings)
        if self.num_bytes - self._unused_bytes + num_bytes > self._limits.cache_bytes:
            return None
        while self.num_bytes + num_bytes > self._limits.cache_bytes:
            self._drops.append(self.forget(next(iter(self._unused))))
        slot = self._free_slots.pop() if self._free_slots else len(self._entries)
        self._entries[key] = _Entry(slot, num_bytes, pins=1)
        self.num_bytes += num_bytes
        return slot

    def forget(self, key: bytes) -> int:
        """Take an unpinned image out; its slot, which the next image may get."""
        del self._unused[key]
        entry = self._entries.pop(key)
        self.num_bytes -= entry.num_bytes
        self._unused_bytes -= entry.num_bytes
        self._free_slots.append(entry.slot)
        return entry.slot

    def forget_unused(self) -> None:
        """Take out what nobody has pinned."""
        while self._unused:
            self._drops.append(self.forget(next(iter(self._unused))))

    def take_drops(self) -> "array[int]":
        """int32: the slots that were evicted since the last call."""
        drops, self._drops = self._drops, ints()
        return drops

    def check(self, pins: dict[bytes, int]) -> None:
        """Assert that entries are pinned as often as `pins` says, that bytes add up, and that no slot is lost."""
        assert {key: entry.pins for key, entry in self._entries.items() if entry.pins} == pins, "pins are miscounted"
        assert set(self._unused) == {key for key, entry in self._entries.items() if not entry.pins}, "unused and pinned"
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values()), "bytes are miscounted"
        assert self._unused_bytes == sum(self._entries[key].num_bytes for key in self._unused), "bytes are miscounted"
        assert self.num_bytes <= self._limits.cache_bytes, "more embeddings than memory for them"
        slots = sorted([*self._free_slots, *(entry.slot for entry in self._entries.values())])
        assert slots == list(range(len(slots))), "a slot is lost or used twice"
