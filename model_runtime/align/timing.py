"""How long operations take on a device, and what it does at most. Called by `coverage.py` and `firstlight ops`."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SECONDS = 0.1
"""That a call is repeated for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the device does at most, measured."""

    read_bytes: float
    """A second."""
    flops: float
    """Of products of large matrices in the type of hidden states."""


def limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """By a sum of 256 MiB and a product of matrices."""
    numbers = torch.ones(1 << 26, device=device)
    left, right = (torch.ones(shape, device=device, dtype=dtype) for shape in ((1024, 2048), (2048, 2048)))
    return Limits(
        read_bytes=numbers.nbytes / best_seconds(numbers.sum, device),
        flops=2 * 1024 * 2048 * 2048 / best_seconds(lambda: left @ right, device),
    )


def best_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of repeated calls, after one to warm up."""
    call()
    best, deadline = math.inf, time.perf_counter() + SECONDS
    while best == math.inf or time.perf_counter() < deadline:
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def wait(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
