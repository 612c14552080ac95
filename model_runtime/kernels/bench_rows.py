"""Times products of rows of 8 bits with integers of 8 bits beside those of rows of 16 bits, in turns, so that what else
the machine does meets both: `python -m model_runtime.kernels.bench_rows`. A command for people.
"""

import statistics
import time
from collections.abc import Sequence

import torch

from model_runtime.ops import load_ops
from model_runtime.ops.registry import Ops, PackedWeight
from model_runtime.quantized import RowBits, quantize

SHAPES_NK = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""The matrices of a layer of SmolLM2."""
ROWS = (1, 4, 16, 64, 256)
SECONDS_PER_CASE = 2.0
BITS: tuple[RowBits, RowBits] = (16, 8)


def layer_seconds(ops: Ops, weights: Sequence[PackedWeight], rows: int) -> float:
    """Of all products of a layer, the rows made integers within them."""
    inputs = [torch.randn(rows, weight.num_columns) for weight in weights]
    start = time.perf_counter()
    for x, weight in zip(inputs, weights, strict=True):
        ops.linear(x, weight, None)
    return time.perf_counter() - start


def main() -> None:
    """Print a line for each number of rows: the shortest and the median time of both, and their ratios."""
    ops = load_ops(torch.device("cpu"), "auto")
    matrices = [quantize(torch.randn(shape), "q8_0") for shape in SHAPES_NK]
    weights = [[ops.pack_quantized(matrix, bits) for matrix in matrices] for bits in BITS]
    print(f"{torch.get_num_threads()} threads")
    for rows in ROWS:
        taken: list[list[float]] = [[], []]
        deadline = time.perf_counter() + SECONDS_PER_CASE
        while time.perf_counter() < deadline or len(taken[0]) < 3:
            for times, packed in zip(taken, weights, strict=True):
                times.append(layer_seconds(ops, packed, rows))
        shortest, middle = ([function(times) for times in taken] for function in (min, statistics.median))
        print(
            f"{rows:4} rows: {shortest[0] * 1e6:8.0f} us with 16 bits, {shortest[1] * 1e6:8.0f} us with 8, "
            f"{shortest[0] / shortest[1]:5.2f} times as fast (medians {middle[0] / middle[1]:5.2f}, "
            f"{len(taken[0])} turns)"
        )


if __name__ == "__main__":
    main()
