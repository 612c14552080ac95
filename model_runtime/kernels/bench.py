"""Times the CPU operations against torch and the machine's limits in one run: `python -m model_runtime.kernels.bench`.

Numbers from different runs on a shared machine do not compare; ratios within one do. A command for people.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.kv_store import KVLayer, quantise
from model_runtime.latent_store import allocate_latents
from model_runtime.memory.caches import bytes_per_block, latent_bytes_per_block
from model_runtime.ops import load_ops
from model_runtime.ops.registry import HeadShape, Ops, PackedWeight, Scoring
from model_runtime.quantized import QuantizedFormat, quantize

SHAPES_NK = ((1536, 576), (576, 1536), (49152, 576))
ROWS = (1, 2, 4, 8, 16, 64, 256)
STORAGE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZED: tuple[QuantizedFormat, ...] = ("q8_0", "q4_0", "q4_0_128")
KV_TYPES = (*STORAGE_TYPES, torch.int8)
SECONDS_PER_CASE = 0.3
HEADS = HeadShape(num_heads=9, num_kv_heads=3, head_dim=64)
SCORING = Scoring(scale=0.125)
BLOCK_SIZE = 16
CPU = torch.device("cpu")
LATENT_HEADS, LATENT_RANK, ROW = 16, 512, 576


def best_seconds(call: Callable[[], object], seconds: float = SECONDS_PER_CASE) -> float:
    """Shortest of repeated calls within the time given, after one to warm up."""
    call()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def read_bandwidth(seconds: float = SECONDS_PER_CASE) -> float:
    """Bytes per second of summing 256 MiB."""
    numbers = torch.ones(1 << 26)
    return numbers.numel() * 4 / best_seconds(numbers.sum, seconds)


def pack(ops: Ops, weight: Tensor, stored: torch.dtype | QuantizedFormat) -> PackedWeight:
    """The weight as `stored`; integers are multiplied with rows of integers."""
    if isinstance(stored, torch.dtype):
        return ops.pack(weight.to(stored))
    return ops.pack_quantized(quantize(weight, stored), 16)


def bench_linear(ops: Ops, rows: int, n: int, k: int, stored: torch.dtype | QuantizedFormat) -> None:
    """One row: x [rows, k] times a weight [n, k], against torch in float32."""
    x, weight = torch.randn(rows, k), torch.randn(n, k)
    packed = pack(ops, weight, stored)
    ours = best_seconds(lambda: ops.linear(x, packed, None))
    theirs = best_seconds(lambda: torch.nn.functional.linear(x, weight))
    gflops, gbytes = 2 * rows * n * k / ours / 1e9, packed.num_bytes / ours / 1e9
    name = str(stored).removeprefix("torch.")
    print(
        f"{n:6} x {k:<5} {name:9} {rows:4} rows {gflops:7.1f} GFLOP/s {gbytes:6.1f} GB/s {theirs / ours:6.2f} x torch"
    )


def random_cache(num_blocks: int, dtype: torch.dtype) -> KVLayer:
    """A layer's cache full of random keys and values, stored as `dtype`."""
    key_NHBD, value_NHBD = torch.randn(2, num_blocks, HEADS.num_kv_heads, BLOCK_SIZE, HEADS.head_dim)
    scales_NH2B = None
    if dtype == torch.int8:
        (key_NHBD, key_scales), (value_NHBD, value_scales) = quantise(key_NHBD), quantise(value_NHBD)
        scales_NH2B = torch.stack([key_scales, value_scales], dim=2)
    return KVLayer(key_NHBD.transpose(2, 3).to(dtype).contiguous(), value_NHBD.to(dtype), scales_NH2B)


def end_of_context(
    sequences: int, queries: int, context: int, dtype: torch.dtype = torch.float32
) -> tuple[Batch, KVLayer, Tensor]:
    """`queries` tokens at the end of each of `sequences` contexts, over blocks in random order."""
    blocks = context // BLOCK_SIZE
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    positions_T = torch.arange(context - queries, context, dtype=torch.int32).repeat(sequences)
    batch = Batch(
        token_ids_T=torch.zeros(sequences * queries, dtype=torch.int32),
        positions_T=positions_T,
        slots_T=torch.zeros(sequences * queries, dtype=torch.int64),
        query_starts_S1=starts * queries,
        kv_lens_S=torch.full((sequences,), context, dtype=torch.int32),
        block_tables=torch.randperm(sequences * blocks).int(),
        table_starts_S1=starts * blocks,
        block_size=BLOCK_SIZE,
        rope_rows_T=positions_T,
    )
    width = (HEADS.num_heads + 2 * HEADS.num_kv_heads) * HEADS.head_dim
    return batch, random_cache(sequences * blocks, dtype), torch.randn(sequences * queries, width)


def bench_attention(ops: Ops, reference: Ops, sequences: int, queries: int, context: int, dtype: torch.dtype) -> None:
    """One row: rates count the keys that a query sees, and each stored key and value once per sequence."""
    batch, kv, qkv = end_of_context(sequences, queries, context, dtype)
    ours = best_seconds(lambda: ops.paged_attention(qkv, kv, batch, HEADS, SCORING))
    theirs = best_seconds(lambda: reference.paged_attention(qkv, kv, batch, HEADS, SCORING))
    seen = sequences * queries * (context - (queries - 1) / 2)
    gflops = 4 * seen * HEADS.num_heads * HEADS.head_dim / ours / 1e9
    gbytes = sequences * context * token_bytes(dtype) / ours / 1e9
    print(
        f"{sequences:3} sequences x {queries:3} queries, context {context:5} {str(dtype).removeprefix('torch.'):8} "
        f"{ours * 1e6:8.0f} us {gflops:6.1f} GFLOP/s {gbytes:6.1f} GB/s {theirs / ours:6.2f} x reference"
    )


def bench_latent(ops: Ops, reference: Ops, sequences: int, queries: int, context: int, dtype: torch.dtype) -> None:
    """One row: latent attention of `LATENT_HEADS` heads over rows as DeepSeek-V3 has them; rates as above."""
    batch, _, _ = end_of_context(sequences, queries, context, dtype)
    kv = allocate_latents(sequences * context // BLOCK_SIZE, BLOCK_SIZE, ROW, LATENT_RANK, dtype, CPU)
    kv.write(torch.arange(sequences * context), torch.randn(sequences * context, ROW))
    query = torch.randn(sequences * queries, LATENT_HEADS, ROW)
    ours = best_seconds(lambda: ops.latent_attention(query, kv, batch, SCORING.scale))
    theirs = best_seconds(lambda: reference.latent_attention(query, kv, batch, SCORING.scale))
    seen = sequences * queries * (context - (queries - 1) / 2)
    gflops = 2 * seen * LATENT_HEADS * (ROW + LATENT_RANK) / ours / 1e9
    gbytes = latent_bytes_per_block(1, ROW, sequences * context, dtype) / ours / 1e9
    print(
        f"latent {sequences:3} sequences x {queries:3} queries, context {context:5} "
        f"{str(dtype).removeprefix('torch.'):8} {ours * 1e6:8.0f} us {gflops:6.1f} GFLOP/s {gbytes:6.1f} GB/s "
        f"{theirs / ours:6.2f} x reference"
    )


def token_bytes(dtype: torch.dtype) -> int:
    """Of a token's keys and values in one layer."""
    return bytes_per_block(1, HEADS.num_kv_heads, HEADS.head_dim, 1, dtype)


def bench_small(ops: Ops, reference: Ops, rows: int) -> None:
    """One row: the operations that work on rows of 576 numbers, and the gate of 1536."""
    x, weight, gate_up = torch.randn(rows, 576), torch.randn(576), torch.randn(rows, 3072)
    norm = best_seconds(lambda: ops.rms_norm(x, weight, 1e-5))
    norm_torch = best_seconds(lambda: reference.rms_norm(x, weight, 1e-5))
    gate = best_seconds(lambda: ops.silu_mul(gate_up))
    gate_torch = best_seconds(lambda: reference.silu_mul(gate_up))
    print(
        f"{rows:4} rows rms_norm {norm * 1e6:7.1f} us {norm_torch / norm:6.2f} x reference, "
        f"silu_mul {gate * 1e6:7.1f} us {gate_torch / gate:6.2f} x reference"
    )


def main() -> None:
    """Print the tables."""
    ops, reference = load_ops(CPU, "auto"), load_ops(CPU, "reference")
    print(f"{torch.get_num_threads()} threads, memory read {read_bandwidth() / 1e9:.1f} GB/s")
    for n, k in SHAPES_NK:
        for stored in (*STORAGE_TYPES, *QUANTIZED):
            for rows in ROWS:
                bench_linear(ops, rows, n, k, stored)
    for sequences, queries, context in ((1, 1, 512), (1, 1, 8192), (16, 1, 512), (64, 1, 512), (1, 512, 512)):
        for dtype in KV_TYPES:
            bench_attention(ops, reference, sequences, queries, context, dtype)
    for sequences, queries, context in ((1, 1, 512), (1, 1, 8192), (16, 1, 512), (1, 64, 512)):
        for dtype in KV_TYPES:
            bench_latent(ops, reference, sequences, queries, context, dtype)
    for rows in (1, 16, 256):
        bench_small(ops, reference, rows)


if __name__ == "__main__":
    main()
