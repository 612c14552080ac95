"""Times the products with all matrices of a model, one after the other as a step computes them, against the machine's
limits and torch in one run: `python -m model_runtime.kernels.bench_linear`.

Few rows are limited by reading the weights, which no cache holds here, many by arithmetic. Numbers from different runs
on a shared machine do not compare; ratios within one do. A command for people.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from model_runtime.kernels.bench import SECONDS_PER_CASE, best_seconds, read_bandwidth
from model_runtime.ops import load_ops
from model_runtime.ops.registry import Ops, PackedWeight

MODELS: Mapping[str, tuple[int, tuple[tuple[int, int], ...], tuple[int, int]]] = {
    "SmolLM2-135M": (30, ((960, 576), (576, 576), (3072, 576), (576, 1536)), (49152, 576)),
    "1.7 billion": (4, ((2560, 2048), (2048, 2048), (11008, 2048), (2048, 5504)), (32768, 2048)),
}
"""Layers, the (rows, columns) of a layer's matrices, those of the LM head. Of the larger model a few layers."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
ROWS_OF_HEAD = 64
"""With more rows than this a step computes prompts, whose rows need no logits."""
STORAGE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def gemm_rate(seconds: float = SECONDS_PER_CASE) -> float:
    """Operations a second of torch's product of [1024, 2048] and [2048, 2048]."""
    a, b = torch.randn(1024, 2048), torch.randn(2048, 2048)
    return 2 * 1024 * 2048**2 / best_seconds(lambda: a @ b, seconds)


def run(ops: Ops, weights: list[PackedWeight], x: Mapping[int, Tensor]) -> None:
    """All products, the rows of x by their number of columns."""
    for weight in weights:
        ops.linear(x[weight.num_columns], weight, None)


def run_torch(weights: list[Tensor], x: Mapping[int, Tensor]) -> None:
    """The same in torch."""
    for weight in weights:
        torch.nn.functional.linear(x[weight.shape[1]], weight)


def bench_rows(ops: Ops, weights: list[Tensor], rows: int, bandwidth: float, gemm: float) -> str:
    """One line: rates for this many rows, and what share of the limits they are. Torch computes in float32 alone."""
    packed = [ops.pack(weight) for weight in weights]
    x = {weight.shape[1]: torch.randn(rows, weight.shape[1]) for weight in weights}
    seconds = best_seconds(lambda: run(ops, packed, x))
    operations = 2 * rows * sum(weight.numel() for weight in weights) / seconds
    read = sum(weight.num_bytes for weight in packed) / seconds
    line = (
        f"{rows:4} rows {seconds * 1e3:8.2f} ms, read {read / 1e9:5.1f} GB/s ({read / bandwidth:4.0%}), "
        f"{operations / 1e9:6.1f} GFLOP/s ({operations / gemm:4.0%})"
    )
    if weights[0].dtype != torch.float32:
        return line
    return f"{line}, {best_seconds(lambda: run_torch(weights, x)) / seconds:5.2f} x torch"


def bench_model(ops: Ops, name: str, dtype: torch.dtype, bandwidth: float, gemm: float) -> None:
    """The lines of one storage type."""
    num_layers, layer, head = MODELS[name]
    weights = [torch.randn(shape).to(dtype) for shape in (*layer * num_layers, head)]
    for rows in ROWS:
        line = bench_rows(ops, weights[: len(weights) - (rows > ROWS_OF_HEAD)], rows, bandwidth, gemm)
        print(f"{name:12} {str(dtype).removeprefix('torch.'):9} {line}", flush=True)


def main() -> None:
    """Print the table."""
    ops = load_ops(torch.device("cpu"), "auto")
    bandwidth, gemm = read_bandwidth(), gemm_rate()
    print(
        f"{torch.get_num_threads()} threads; limits: read {bandwidth / 1e9:.1f} GB/s (sum of 256 MB), "
        f"{gemm / 1e9:.0f} GFLOP/s (torch, 1024 x 2048 x 2048)"
    )
    for name in MODELS:
        for dtype in STORAGE_TYPES:
            bench_model(ops, name, dtype, bandwidth, gemm)


if __name__ == "__main__":
    main()
