"""What `test_parallel` runs in a process of its own: `python -m tests.model_runtime.rank_sums RANK SIZE FILE`."""

import json
import sys

import torch

from model_runtime.layout import Layout
from model_runtime.parallel import connect, disconnect


def main() -> None:
    """Join, sum, say what came out."""
    rank, size, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    mesh = connect(Layout(rank=rank, tensor_size=size), f"file://{file}", size, torch.device("cpu"), 30.0)
    x = torch.tensor([1.0, 2.0]) * 10**rank
    mesh.tensor.all_reduce(x)
    disconnect()
    print(json.dumps([mesh.tensor.rank, x.tolist()]))


if __name__ == "__main__":
    main()
