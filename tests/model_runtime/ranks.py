"""Ranks for tests: in threads of this process, with collectives over gloo or shared memory, or in processes of their
own."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed

from model_runtime.layout import DIMENSIONS, Layout
from model_runtime.parallel import Alone, Collectives, Mesh, TorchCollectives
from model_runtime.shared_collectives import SharedMemoryCollectives, share_memory
from model_runtime.shared_memory import make_region

T = TypeVar("T")
LIMIT_S = 60.0


def stage_mesh(stage: int, num_stages: int) -> Mesh:
    """Of a rank that is a stage of a pipeline, and hands nothing on by itself."""
    layout = Layout(rank=stage, pipeline_size=num_stages)
    return Mesh(layout=layout, tensor=Alone(), context=Alone(), pipeline=Alone())


def on_threads(size: int, function: Callable[[TorchCollectives], T]) -> list[T]:
    """function(collectives) on `size` ranks at once; what each returned, in the order of ranks."""
    store = torch.distributed.HashStore()

    def one(rank: int) -> T:
        return function(
            TorchCollectives(
                torch.distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=LIMIT_S))  # type: ignore[attr-defined]
            )
        )

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def mesh_on_threads(layout: Layout, function: Callable[[Mesh], T]) -> list[T]:
    """function(mesh) on every rank of the layout at once, over gloo; what each returned, in the order of ranks."""
    store = torch.distributed.HashStore()

    def one(rank: int) -> T:
        found: dict[str, Collectives] = {}
        for dimension in DIMENSIONS:
            ranks = next(ranks for ranks in layout.groups(dimension) if rank in ranks)
            if len(ranks) == 1:
                found[dimension] = Alone()
                continue
            own = torch.distributed.PrefixStore(f"{dimension} {ranks}", store)
            place = ranks.index(rank), len(ranks)
            found[dimension] = TorchCollectives(
                torch.distributed.ProcessGroupGloo(own, *place, timedelta(seconds=LIMIT_S))  # type: ignore[attr-defined]
            )
        return function(Mesh(layout=replace(layout, rank=rank), **found))

    with ThreadPoolExecutor(layout.size) as pool:
        return list(pool.map(one, range(layout.size)))


def mesh_on_shared_memory(layout: Layout, function: Callable[[Mesh], T]) -> list[T]:
    """As `mesh_on_threads`."""
    descriptor = make_region(*map(len, layout.areas))
    meshes = [share_memory(replace(layout, rank=rank), descriptor, LIMIT_S) for rank in range(layout.size)]
    os.close(descriptor)
    with ThreadPoolExecutor(layout.size) as pool:
        return list(pool.map(function, meshes))


def on_shared_memory(size: int, function: Callable[[SharedMemoryCollectives], T]) -> list[T]:
    """As `on_threads`."""
    descriptor = make_region(size)
    everyone = [SharedMemoryCollectives(descriptor, rank, size, LIMIT_S) for rank in range(size)]
    os.close(descriptor)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, everyone))


def in_processes(module: str, size: int, arguments: Sequence[str]) -> list[str]:
    """What `python -m module RANK SIZE *arguments` writes to its standard output, in the order of ranks."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(size), *arguments],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size
    return outputs
