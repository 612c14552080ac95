"""Ranks for tests: in threads of this process, with collectives over gloo or shared memory, or in processes of their
own."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed

from model_runtime.layout import Layout
from model_runtime.parallel import Alone, Collectives, Mesh, TorchCollectives
from model_runtime.shared_collectives import SharedMemoryCollectives
from model_runtime.shared_memory import make_region

T = TypeVar("T")
LIMIT_S = 60.0


def tensor_mesh(collectives: Collectives) -> Mesh:
    """Ranks that share every layer."""
    layout = Layout(rank=collectives.rank, tensor_size=collectives.size)
    return Mesh(layout=layout, tensor=collectives, context=Alone(), pipeline=Alone())


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
