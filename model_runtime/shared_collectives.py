"""`Collectives` of ranks on one machine's processors, in memory that they share (`kernels/collective.h`). Engine
process and followers.

A call costs some microseconds, where gloo takes half a millisecond.
"""

import ctypes
import math
import mmap
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from itertools import accumulate

import torch
from torch import Tensor

from model_runtime.kernels.library import library
from model_runtime.layout import Dimension, Layout
from model_runtime.parallel import Alone, CollectiveCounters, Collectives, Mesh
from model_runtime.shared_memory import LINK_SLOTS, SLOT_BYTES, region_bytes

NS = 1e-9


class CCollective(ctypes.Structure):
    """A rank's side, in the layout of `collective.h`."""

    _fields_ = (
        ("memory", c_void_p),
        ("rank", c_int64),
        ("size", c_int64),
        ("slot_bytes", c_int64),
        ("timeout_ns", c_int64),
        ("arrivals", c_int64),
        ("sent", c_int64),
        ("taken", c_int64),
        ("calls", c_int64),
        ("sent_bytes", c_int64),
        ("ns", c_int64),
        ("waiting_ns", c_int64),
    )


class SharedMemoryCollectives:
    """`descriptor` is of `shared_memory.make_region`, which every rank has; the group's area begins at `offset`. An
    assertion says which rank was lost: it ended, or did not come within the time-out."""

    def __init__(self, descriptor: int, rank: int, size: int, timeout_seconds: float, offset: int = 0) -> None:
        self.rank, self.size = rank, size
        self._memory = mmap.mmap(descriptor, region_bytes(size), offset=offset)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.structure = CCollective(address, rank, size, SLOT_BYTES, round(timeout_seconds / NS))
        """For compiled code that sums by itself; `check` says what it returned."""
        assert library().join(ctypes.byref(self.structure)), f"{size} ranks are too many for one machine"

    @property
    def counters(self) -> CollectiveCounters:
        """Those of the structure."""
        c = self.structure
        return CollectiveCounters(
            calls=c.calls, sent_bytes=c.sent_bytes, seconds=c.ns * NS, waiting_seconds=c.waiting_ns * NS
        )

    def check(self, lost: int) -> None:
        """Raises AssertionError unless everybody came; `lost` is what a function of `collective.h` returned."""
        assert not lost, f"rank {lost - 1} ended or did not come to a collective in time"

    def all_reduce(self, x: Tensor) -> None:
        """Of float32."""
        assert x.dtype == torch.float32 and x.is_contiguous(), f"a sum of {x.dtype}"
        self.check(library().all_reduce(ctypes.byref(self.structure), x.data_ptr(), x.numel()))

    def gather(self, x: Tensor, lengths: Sequence[int]) -> list[Tensor] | None:
        """Rank 0 has its own already, and shares nothing."""
        assert len(x) == lengths[self.rank], f"{len(x)} instead of {lengths[self.rank]}"
        parts = None
        if self.rank == 0:
            parts = [x, *(x.new_empty((length, *x.shape[1:])) for length in lengths[1:])]
        self._exchange(x, parts, [0, *(length * _row_bytes(x) for length in lengths[1:])])
        return parts

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Parts in memory of their own."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._exchange(x, parts, [x.nbytes] * self.size)
        return parts

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Each rank's rows into their place."""
        out = x.new_empty((sum(counts), *x.shape[1:]))
        self._exchange(x, list(torch.split(out, list(counts))), [count * _row_bytes(x) for count in counts])
        return out

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """A rank's slot has what it gives to all of them, of which each takes its rows."""
        out, width = x.new_empty((sum(row[self.rank] for row in counts), *x.shape[1:])), _row_bytes(x)
        parts = list(torch.split(out, [row[self.rank] for row in counts]))
        begins = [sum(row[: self.rank]) * width for row in counts]
        self._exchange(x, parts, [sum(row) * width for row in counts], begins)
        return out

    def broadcast(self, x: Tensor, source: int) -> None:
        """Only the source has a part."""
        assert 0 <= source < self.size, f"there is no rank {source}"
        assert x.is_contiguous(), "what is received into must be contiguous"
        self._exchange(x, [x] * self.size, [x.nbytes if rank == source else 0 for rank in range(self.size)])

    def send(self, x: Tensor) -> None:
        """Waits only where LINK_SLOTS are full."""
        mine = x.contiguous()
        self.check(library().send(ctypes.byref(self.structure), mine.data_ptr(), mine.nbytes))

    def fits(self, sizes: Sequence[int]) -> bool:
        """Each in slots of its own."""
        return sum(-(-size // SLOT_BYTES) for size in sizes) <= LINK_SLOTS

    def receive(self, x: Tensor) -> None:
        """Into its memory."""
        assert x.is_contiguous(), "what is received into must be contiguous"
        self.check(library().receive(ctypes.byref(self.structure), x.data_ptr(), x.nbytes))

    def _exchange(
        self, x: Tensor, parts: list[Tensor] | None, nbytes: Sequence[int], begins: Sequence[int] | None = None
    ) -> None:
        """Each rank gives `nbytes` of its x, of which this one takes those from `begins` on that fill its part."""
        mine = x.contiguous()
        begins = [0] * self.size if begins is None else begins
        taken = [0] * self.size if parts is None else [part.nbytes for part in parts]
        ends = [begin + min(count, given) for begin, count, given in zip(begins, taken, nbytes, strict=True)]
        pointers = [None] * self.size if parts is None else [part.data_ptr() for part in parts]
        into, sizes = (c_void_p * self.size)(*pointers), (c_int64 * self.size)(*nbytes)
        ranges = (c_int64 * self.size)(*begins), (c_int64 * self.size)(*ends)
        self.check(library().exchange(ctypes.byref(self.structure), mine.data_ptr(), sizes, into, *ranges))


def _row_bytes(x: Tensor) -> int:
    return x.element_size() * math.prod(x.shape[1:])


def share_memory(layout: Layout, descriptor: int, timeout_seconds: float) -> Mesh:
    """This rank's groups, each in its area of the memory, which has those of `Layout.areas`."""
    sizes = [region_bytes(len(ranks)) for ranks in layout.areas]
    offsets = dict(zip(map(tuple, layout.areas), accumulate(sizes, initial=0), strict=False))

    def group(dimension: Dimension) -> Collectives:
        ranks = next(ranks for ranks in layout.groups(dimension) if layout.rank in ranks)
        if len(ranks) == 1:
            return Alone()
        place = ranks.index(layout.rank), len(ranks)
        return SharedMemoryCollectives(descriptor, *place, timeout_seconds, offsets[tuple(ranks)])

    return Mesh(layout=layout, tensor=group("tensor"), context=group("context"), pipeline=group("pipeline"))
