"""What an all-reduce costs: `python -m model_runtime.kernels.bench_collectives [--ranks 2]`, a line for each size.

Ranks are processes with one thread each; shared memory, and gloo beside it. Times are of rank 0, medians.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from model_runtime.layout import Layout
from model_runtime.ops import set_threads
from model_runtime.parallel import Collectives, connect, disconnect
from model_runtime.shared_collectives import SharedMemoryCollectives
from model_runtime.shared_memory import make_region

SIZES = (576, 9216, 36864, 294912)
"""Floats: hidden states of SmolLM2 for 1, 16, 64 and 512 tokens."""
TIMEOUT_S = 60.0


def medians(collectives: Collectives, rounds: int) -> list[float]:
    """Seconds of an all-reduce, for each of SIZES."""
    found = []
    for size in SIZES:
        x, times = torch.zeros(size), []
        for _ in range(rounds):
            began = time.perf_counter()
            collectives.all_reduce(x)
            times.append(time.perf_counter() - began)
        found.append(statistics.median(times))
    return found


def measure(rank: int, size: int, descriptor: int, folder: str) -> None:
    """One rank; rank 0 prints."""
    set_threads(1)
    shared = medians(SharedMemoryCollectives(descriptor, rank, size, TIMEOUT_S), 2000)
    layout = Layout(rank=rank, tensor_size=size)
    gloo = medians(connect(layout, f"file://{folder}/meet", 2, torch.device("cpu"), TIMEOUT_S).tensor, 100)
    disconnect()
    if rank == 0:
        for floats, ours, theirs in zip(SIZES, shared, gloo, strict=True):
            print(f"{floats:>7} floats  shared memory {ours * 1e6:>7.1f} us  gloo {theirs * 1e6:>7.1f} us")


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank, descriptor, folder = arguments.rank
        return measure(int(rank), arguments.ranks, int(descriptor), folder)
    region = make_region(arguments.ranks)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, "--ranks", str(arguments.ranks), "--rank"]
        here = Path.cwd()
        ranks = [
            subprocess.Popen([*command, str(rank), str(region), folder], pass_fds=[region], cwd=here)
            for rank in range(arguments.ranks)
        ]
        sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
