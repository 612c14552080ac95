"""What two threads of this machine can do: a JSON line with the rate of reading memory and of a large float32 product.

`python docs/benchmarks/machine_limits.py [THREADS]`, with any Python that has torch. The best of many runs, since a
limit is what nothing exceeds. Reading is the sum of 256 MiB; the product is [1024, 2048] x [2048, 2048].
"""

import json
import sys
import time
from collections.abc import Callable

import torch

SECONDS = 2.0


def best_seconds(call: Callable[[], object]) -> float:
    """Shortest of repeated calls within SECONDS, after one to warm up."""
    call()
    best, deadline = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Measure both."""
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    numbers, a, b = torch.ones(1 << 26), torch.randn(1024, 2048), torch.randn(2048, 2048)
    read = numbers.numel() * 4 / best_seconds(numbers.sum)
    product = 2 * 1024 * 2048 * 2048 / best_seconds(lambda: a @ b)
    limits = {"read_gb_s": round(read / 1e9, 1), "fp32_gflop_s": round(product / 1e9, 1), "version": torch.__version__}
    print(json.dumps({"engine": "machine"} | limits))


if __name__ == "__main__":
    main()
