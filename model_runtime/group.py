"""One model over several ranks: where a rank stands, how it meets the others, what they agree upon. Engine process and
followers.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from model_runtime.config import RuntimeConfig
from model_runtime.layout import Layout, layout_of
from model_runtime.parallel import ONE_RANK, Mesh, connect
from model_runtime.rank_stats import RankStats
from model_runtime.runner import Runner
from model_runtime.shared_collectives import share_memory
from model_runtime.transport import Endpoints, PoolFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands, and where it meets the others."""

    layout: Layout
    ranks_here: int
    """Ranks on this machine, which share its processors and memory."""
    region: int | None
    """Descriptor of the memory that the ranks share (`shared_memory`); None between machines."""
    rendezvous: str
    """For torch's process groups, where there is no shared memory or no compiled kernels: see `rendezvous.py`."""
    endpoints: Endpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """What loading a model must know of the ranks that share it."""

    mesh: Mesh
    ranks_here: int
    agree: Callable[[PoolFacts], PoolFacts]
    """What all ranks have room for, of what this one has; waits for the others."""


ALONE = Ranks(mesh=ONE_RANK, ranks_here=1, agree=lambda facts: facts)


class StepMeter:
    """Counts the steps of a rank and the time that they take."""

    def __init__(self, mesh: Mesh, runner: Runner) -> None:
        self._mesh, self._runner, self._steps, self._seconds = mesh, runner, 0, 0.0

    @contextmanager
    def step(self, counts: bool = True) -> Iterator[None]:
        """One of them, or a part of one that was counted."""
        began = time.perf_counter()
        yield
        self._steps += counts
        self._seconds += time.perf_counter() - began

    @property
    def stats(self) -> RankStats:
        """So far."""
        counters = self._mesh.counters
        return RankStats(
            rank=self._mesh.layout.rank,
            steps=self._steps,
            step_seconds=self._seconds,
            collectives=counters.calls,
            sent_bytes=counters.sent_bytes,
            collective_seconds=counters.seconds,
            waiting_seconds=counters.waiting_seconds,
            expert_tokens=self._runner.expert_tokens,
        )


def local_place(layout: Layout, folder: Path, generation: int, region: int) -> Place:
    """All ranks are on this machine, and have a private folder in common; names are short, since those of sockets may
    not be long."""
    base = f"{folder}/g{generation}"
    return Place(
        layout=layout,
        ranks_here=layout.size,
        region=region,
        rendezvous=f"file://{base}.meet",
        endpoints=Endpoints(
            plans=tuple(f"ipc://{base}-{rank}" for rank in range(1, layout.size)), reports=f"ipc://{base}-0"
        ),
    )


def remote_place(layout: Layout, runtime: RuntimeConfig) -> Place:
    """Ranks are on several machines, of which the first listens."""
    host, port = runtime.master_addr, runtime.master_port
    return Place(
        layout=layout,
        ranks_here=len(runtime.own_ranks),
        region=None,
        rendezvous=f"tcp://{host}:{port}",
        endpoints=Endpoints(
            plans=tuple(f"tcp://{host}:{port + 1 + rank}" for rank in range(1, layout.size)),
            reports=f"tcp://{host}:{port + 1}",
        ),
    )


def place_of(rank: int, runtime: RuntimeConfig, folder: Path, generation: int, region: int) -> Place:
    """Of a rank of the engine; `folder` and `region` are what the ranks of this machine have in common."""
    layout = layout_of(runtime, rank)
    if runtime.nnodes > 1:
        return remote_place(layout, runtime)
    return local_place(layout, folder, generation, region)


def meet(place: Place, device: torch.device, is_compiled: bool, timeout_seconds: float) -> Mesh:
    """The groups of a rank: in shared memory where that can be."""
    if place.region is not None and device.type == "cpu" and is_compiled:
        return share_memory(place.layout, place.region, timeout_seconds)
    return connect(place.layout, place.rendezvous, place.ranks_here, device, timeout_seconds)
