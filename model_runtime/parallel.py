"""What ranks say to each other. Nothing else uses `torch.distributed` but `rendezvous.py`. Engine process and ranks.

A model is cut over `Layout.size` processes. Each has `Collectives` for every group that it is in; whatever they sum is
summed in the order of ranks, so that every rank has the same bits, and has them again at the next run.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed
from torch import Tensor

from model_runtime.layout import Layout
from model_runtime.rendezvous import open_store

MAX_SENDING = 16
"""Things on their way to the next rank through a process group of torch."""


@dataclass(slots=True)
class CollectiveCounters:
    """What the collectives of a rank cost since it started."""

    calls: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    waiting_seconds: float = 0.0
    """Of `seconds`, until the last rank had come; 0 where the backend does not tell."""


class Collectives(Protocol):
    """What ranks do together. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This one's number, 0 first."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def counters(self) -> CollectiveCounters:
        """So far."""
        ...

    def all_reduce(self, x: Tensor) -> None:
        """Sum over the ranks, in place; addends in the order of ranks, so every rank has the same bits."""
        ...

    def gather(self, x: Tensor, lengths: Sequence[int]) -> list[Tensor] | None:
        """To rank 0, in the order of ranks; None elsewhere. Shapes differ in the first dimension: rank r has
        `lengths[r]` of it."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """To every rank, in the order of ranks. Shapes are equal."""
        ...

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """To every rank, all rows in the order of ranks; rank r has counts[r] of them."""
        ...

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Of rank r's x the first counts[r][0] rows come to rank 0, the next counts[r][1] to rank 1, and so on; what
        came to this one, in the order of ranks."""
        ...

    def broadcast(self, x: Tensor, source: int) -> None:
        """What rank `source` has in x, into everybody's x. Shapes are equal."""
        ...

    def send(self, x: Tensor) -> None:
        """To the next rank, from the last one to the first. May return before it is there; x must not change."""
        ...

    def receive(self, x: Tensor) -> None:
        """What the rank before sent, in the order of its sending, into x, of the same shape."""
        ...

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether a rank can send things of so many bytes before the next one takes any."""
        ...


class Alone:
    """One rank: nothing to do."""

    rank = 0
    size = 1

    @property
    def counters(self) -> CollectiveCounters:
        """Nothing was sent."""
        return CollectiveCounters()

    def all_reduce(self, x: Tensor) -> None:
        """x is the sum."""

    def gather(self, x: Tensor, lengths: Sequence[int]) -> list[Tensor] | None:
        """x is all there is."""
        return [x]

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """x is all there is."""
        return [x]

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x is all there is."""
        return x

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """x is what this one has for itself."""
        return x

    def broadcast(self, x: Tensor, source: int) -> None:
        """x is what rank 0 has."""
        assert source == 0, f"there is no rank {source}"

    def send(self, x: Tensor) -> None:
        """There is no other rank."""
        raise AssertionError("one rank alone sends")

    def receive(self, x: Tensor) -> None:
        """There is no other rank."""
        raise AssertionError("one rank alone receives")

    def fits(self, sizes: Sequence[int]) -> bool:
        """Nothing can be sent."""
        return not sizes


class TorchCollectives:
    """Over a process group of torch: gloo, NCCL, or what torch names for another device. An error or a time-out of the
    group is a RuntimeError, after which the ranks can only be started again."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self.counters = CollectiveCounters()
        """`waiting_seconds` are not known here."""
        self._sending: deque[tuple[torch.distributed.Work, Tensor]] = deque()

    def all_reduce(self, x: Tensor) -> None:
        """All gather, then add: torch's own sums have no promised order."""
        parts = self.all_gather(x)
        x.copy_(parts[0])
        for part in parts[1:]:
            x.add_(part)

    def gather(self, x: Tensor, lengths: Sequence[int]) -> list[Tensor] | None:
        """Each rank sends to rank 0."""
        assert len(x) == lengths[self.rank], f"{len(x)} instead of {lengths[self.rank]}"
        began = time.perf_counter()
        if self.rank > 0:
            self._group.send([x.contiguous()], 0, 0).wait()
            self._count(began, x)
            return None
        parts = [x, *(x.new_empty((length, *x.shape[1:])) for length in lengths[1:])]
        for source in range(1, self.size):
            self._group.recv([parts[source]], source, 0).wait()
        self._count(began, x[:0])
        return parts

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """As the group does it."""
        began = time.perf_counter()
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        self._count(began, x)
        return parts

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Parts are filled up to the longest, since the group gathers equal ones."""
        padded = x.new_zeros((max(counts), *x.shape[1:]))
        padded[: len(x)] = x
        return torch.cat([part[:count] for part, count in zip(self.all_gather(padded), counts, strict=True)])

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """As the group does it."""
        began, received = time.perf_counter(), [row[self.rank] for row in counts]
        out = x.new_empty((sum(received), *x.shape[1:]))
        self._group.alltoall_base(out, x.contiguous(), received, list(counts[self.rank])).wait()
        self._count(began, x)
        return out

    def broadcast(self, x: Tensor, source: int) -> None:
        """As the group does it."""
        assert x.is_contiguous(), "what is received into must be contiguous"
        began = time.perf_counter()
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._group.broadcast([x], options).wait()
        self._count(began, x if self.rank == source else x[:0])

    def send(self, x: Tensor) -> None:
        """Goes on while the group sends, up to MAX_SENDING things."""
        began = time.perf_counter()
        if len(self._sending) == MAX_SENDING:
            self._sending.popleft()[0].wait()
        mine = x.contiguous()
        self._sending.append((self._group.send([mine], (self.rank + 1) % self.size, 0), mine))
        self._count(began, mine)

    def receive(self, x: Tensor) -> None:
        """As the group does it."""
        assert x.is_contiguous(), "what is received into must be contiguous"
        began = time.perf_counter()
        self._group.recv([x], (self.rank - 1) % self.size, 0).wait()
        self._count(began, x[:0])

    def fits(self, sizes: Sequence[int]) -> bool:
        """Of any size."""
        return len(sizes) <= MAX_SENDING

    def _count(self, began: float, sent: Tensor) -> None:
        self.counters.calls += 1
        self.counters.sent_bytes += sent.nbytes
        self.counters.seconds += time.perf_counter() - began


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A rank's groups; `Alone` where it is the only one."""

    layout: Layout
    tensor: Collectives
    context: Collectives
    pipeline: Collectives

    @property
    def counters(self) -> CollectiveCounters:
        """Of all groups together."""
        each = [group.counters for group in (self.tensor, self.context, self.pipeline)]
        return CollectiveCounters(
            calls=sum(counters.calls for counters in each),
            sent_bytes=sum(counters.sent_bytes for counters in each),
            seconds=sum(counters.seconds for counters in each),
            waiting_seconds=sum(counters.waiting_seconds for counters in each),
        )


def tensor_mesh(tensor: Collectives) -> Mesh:
    """Of ranks that share every layer, and nothing else."""
    layout = Layout(rank=tensor.rank, tensor_size=tensor.size)
    return Mesh(layout=layout, tensor=tensor, context=Alone(), pipeline=Alone())


ONE_RANK = tensor_mesh(Alone())


def connect(layout: Layout, rendezvous: str, ranks_here: int, device: torch.device, timeout_seconds: float) -> Mesh:
    """This rank's groups; of the time-out, which is also that of every collective, and errors see
    `rendezvous.open_store`."""
    torch.distributed.init_process_group(
        backend=torch.distributed.get_default_backend_for_device(device),
        store=open_store(rendezvous, layout, ranks_here, timeout_seconds),
        timeout=timedelta(seconds=timeout_seconds),
        world_size=layout.size,
        rank=layout.rank,
    )
    sizes = layout.pipeline_size, layout.context_size, layout.tensor_size
    mesh = torch.distributed.init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "cp", "tp"))
    return Mesh(
        layout=layout,
        tensor=_group(mesh.get_group("tp")),
        context=_group(mesh.get_group("cp")),
        pipeline=_group(mesh.get_group("pp")),
    )


def _group(group: torch.distributed.ProcessGroup) -> Collectives:
    return TorchCollectives(group) if group.size() > 1 else Alone()


def disconnect() -> None:
    """Leave what `connect` joined; a process that ends without it may abort."""
    torch.distributed.destroy_process_group()
