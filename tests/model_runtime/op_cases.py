"""Inputs for tests of operations: seeded numbers, ragged batches over blocks in random order, caches full of NaN."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from model_runtime.batch import Batch, make_batch
from model_runtime.caches import Caches
from model_runtime.kernels.build import BuildError
from model_runtime.kernels.library import library
from model_runtime.kv_store import KVLayer, allocate, quantise
from model_runtime.ops import load_ops
from model_runtime.ops.registry import HeadShape, Ops, RopeTable
from model_runtime.state_store import StateLayer
from scheduler.plan import ImageSpans, SampleRows, ScoreRows, StepPlan, ints

CPU = torch.device("cpu")
EXACT = load_ops(CPU, "reference")
"""In float64 it is what others are held against."""
STORAGE_TYPES = [torch.float32, torch.bfloat16, torch.float16]
KV_TYPES = [*STORAGE_TYPES, torch.int8]


def compiled() -> Ops:
    """The compiled operations; skips where there is no compiler."""
    try:
        library()
    except BuildError as error:
        pytest.skip(str(error))
    return load_ops(CPU, "auto")


def assert_close(actual: Tensor, exact: Tensor, tolerance: float) -> None:
    """Largest error, relative to the largest exact number, is at most `tolerance`; both have the same shape."""
    assert actual.shape == exact.shape
    error = (actual.cpu().double() - exact).abs().max() / exact.abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Seeded standard normal float32 numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Span = tuple[int, int, int]
"""Sequence, first position, one past the last position of an image whose rows attend in both directions."""


def batch_of(
    query_lens: list[int],
    kv_lens: list[int],
    block_size: int,
    num_blocks: int,
    seed: int = 0,
    spans: Sequence[Span] = (),
) -> Batch:
    """A batch whose sequences own random blocks."""
    needed = [-(-kv_len // block_size) for kv_len in kv_lens]
    assert sum(needed) <= num_blocks
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))[: sum(needed)].tolist()
    return batch_with_blocks(query_lens, kv_lens, blocks, block_size, spans)


def batch_with_blocks(
    query_lens: list[int], kv_lens: list[int], blocks: list[int], block_size: int, spans: Sequence[Span] = ()
) -> Batch:
    """A batch from lengths and the concatenated block tables."""
    plan = StepPlan(
        step_id=0,
        token_ids=ints([0] * sum(query_lens)),
        query_lens=ints(query_lens),
        kv_lens=ints(kv_lens),
        block_tables=ints(blocks),
        sample=SampleRows(),
        score=ScoreRows(),
        images=image_spans(query_lens, kv_lens, spans),
    )
    return make_batch(plan, block_size, bidirectional=True)


def image_spans(query_lens: list[int], kv_lens: list[int], spans: Sequence[Span]) -> ImageSpans:
    """What the step holds of these spans; each is image 0."""
    parts = []
    for sequence, start, end in spans:
        first = kv_lens[sequence] - query_lens[sequence]
        begin, stop = max(start, first), min(end, kv_lens[sequence])
        if begin < stop:
            row = sum(query_lens[:sequence]) + begin - first
            parts.append((row, stop - begin, 0, begin - start, start, end))
    rows, lengths, slots, firsts, starts, ends = (ints([part[column] for part in parts]) for column in range(6))
    return ImageSpans(rows=rows, lengths=lengths, slots=slots, firsts=firsts, starts=starts, ends=ends)


def kv_cache(shape: HeadShape, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32) -> KVLayer:
    """A cache full of NaN: what was never written must not matter."""
    kv = allocate(
        num_blocks=num_blocks,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
        dtype=dtype,
        device=CPU,
    )
    fill_with_nan([kv])
    return kv


def fill_with_nan(layers: Caches) -> None:
    """Every number, or of int8 every scale."""
    for layer in layers:
        for pool in (layer.conv_NPC, layer.delta_NHKV) if isinstance(layer, StateLayer) else layer.pools:
            pool.fill_(float("nan") if pool.is_floating_point() else 100)


def as_double(kv: KVLayer) -> KVLayer:
    """What the stored numbers stand for."""
    key_NHDB, value_NHBD = kv.key_NHDB.double(), kv.value_NHBD.double()
    if kv.scales_NH2B is None:
        return KVLayer(key_NHDB, value_NHBD)
    return KVLayer(key_NHDB * kv.scales_NH2B[:, :, :1], value_NHBD * kv.scales_NH2B[:, :, 1, :, None])


def rope_table(num_positions: int, rotary_dim: int, interleaved: bool) -> RopeTable:
    angles = torch.arange(num_positions)[:, None] * 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    return RopeTable(cos_PR2=angles.cos(), sin_PR2=angles.sin(), interleaved=interleaved)


def fill_cache(kv: KVLayer, batch: Batch, seed: int) -> None:
    """Random keys and values at every position that the batch's sequences have."""
    tables, starts = batch.block_tables, batch.table_starts_S1.tolist()
    for s, kv_len in enumerate(batch.kv_lens_S.tolist()):
        position = torch.arange(kv_len)
        block, offset = tables[starts[s] + position // batch.block_size].long(), position % batch.block_size
        _, heads, dim, _ = kv.key_NHDB.shape
        key_LHD, value_LHD = randn(kv_len, heads, dim, seed=seed + s), randn(kv_len, heads, dim, seed=seed + 1000 + s)
        if kv.scales_NH2B is not None:
            key_LHD, kv.scales_NH2B[block, :, 0, offset] = quantise(key_LHD)
            value_LHD, kv.scales_NH2B[block, :, 1, offset] = quantise(value_LHD)
        kv.key_NHDB[block, :, :, offset] = key_LHD.to(kv.key_NHDB.dtype)
        kv.value_NHBD[block, :, offset] = value_LHD.to(kv.value_NHBD.dtype)
