"""What two threads of this machine can do: a JSON line with the rate of reading memory and of a large float32 product.

`python docs/benchmarks/machine_limits.py [THREADS]`, in the project's own environment. The best of many runs, since a
limit is what nothing exceeds. Reading is the sum of 256 MiB; the product is [1024, 2048] x [2048, 2048].
"""

import json
import sys

import torch

from model_runtime.kernels.bench import read_bandwidth
from model_runtime.kernels.bench_linear import gemm_rate

SECONDS = 2.0
"""For each."""


def main() -> None:
    """Measure both."""
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    read, product = read_bandwidth(SECONDS), gemm_rate(SECONDS)
    limits = {"read_gb_s": round(read / 1e9, 1), "fp32_gflop_s": round(product / 1e9, 1), "version": torch.__version__}
    print(json.dumps({"engine": "machine"} | limits))


if __name__ == "__main__":
    main()
