"""Every registered implementation of the operations on heads and the KV cache against the reference in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.kv_store import KVLayer
from model_runtime.ops import set_threads
from model_runtime.ops.registry import HeadShape, Ops, RopeTable, Scoring
from tests.model_runtime.op_cases import (
    EXACT,
    KV_TYPES,
    as_double,
    assert_close,
    batch_of,
    compiled,
    fill_cache,
    kv_cache,
    randn,
    rope_table,
)

SHAPES = [
    HeadShape(num_heads=1, num_kv_heads=1, head_dim=8),
    HeadShape(num_heads=6, num_kv_heads=2, head_dim=64),
    HeadShape(num_heads=5, num_kv_heads=1, head_dim=24),
    HeadShape(num_heads=8, num_kv_heads=1, head_dim=128),
    HeadShape(num_heads=4, num_kv_heads=4, head_dim=80),
    HeadShape(num_heads=14, num_kv_heads=2, head_dim=20),
    HeadShape(num_heads=5, num_kv_heads=3, head_dim=64, absent_heads=(2, 2)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_qk_norm(ops: Ops, shape: HeadShape) -> None:
    qkv = randn(7, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    exact = qkv.double()
    q_weight, k_weight = randn(shape.head_dim, seed=1), randn(shape.head_dim, seed=2)
    ops.qk_norm(qkv, q_weight, k_weight, 1e-6, shape)
    EXACT.qk_norm(exact, q_weight.double(), k_weight.double(), 1e-6, shape)
    assert_close(qkv, exact, 5e-7)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_rope_and_cache(ops: Ops, shape: HeadShape, block_size: int, interleaved: bool) -> None:
    batch = batch_of([5, 1, 20], [5, 30, 27], block_size, 80)
    kv = kv_cache(shape, 80, block_size)
    exact_kv = as_double(kv)
    qkv = randn(26, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    exact = qkv.double()
    for rotary_dim in (shape.head_dim, shape.head_dim // 2):
        rope = rope_table(40, rotary_dim, interleaved)
        ops.rope_and_cache(qkv, rope, batch, kv, shape)
        EXACT.rope_and_cache(exact, rope, batch, exact_kv, shape)
        assert_close(qkv, exact, 1e-6)
    written = ~exact_kv.key_NHDB.isnan()
    assert written.sum() == 26 * shape.num_kv_heads * shape.head_dim
    assert torch.equal(written, ~kv.key_NHDB.isnan())
    assert_close(kv.key_NHDB[written], exact_kv.key_NHDB[written], 1e-6)
    assert_close(kv.value_NHBD.nan_to_num(), exact_kv.value_NHBD.nan_to_num(), 1e-6)


def test_queries_grow_once_they_are_rotated(ops: Ops) -> None:
    shape, batch = SHAPES[1], batch_of([5, 20], [5, 27], 16, 8)
    plain = rope_table(40, 64, False)
    grown, same = (randn(25, 640) for _ in range(2))
    ops.rope_and_cache(same, plain, batch, kv_cache(shape, 8, 16), shape)
    growth_P = 1 + randn(40).abs()
    ops.rope_and_cache(grown, replace(plain, growth_P=growth_P), batch, kv_cache(shape, 8, 16), shape)
    assert torch.equal(grown[:, 384:], same[:, 384:])
    assert torch.equal(grown[:, :384], same[:, :384] * growth_P[batch.positions_T, None])


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_keys_and_values_are_stored_as_the_reference_stores_them(dtype: torch.dtype) -> None:
    """Bit for bit, heads of 12 numbers: ties, ends of ranges, subnormal numbers, zeros, NaN, infinity."""
    shape, block_size = HeadShape(num_heads=1, num_kv_heads=3, head_dim=12), 4
    heads = [
        randn(7, 12, seed=1),
        randn(7, 12, seed=2) * 1e-6,
        randn(7, 12, seed=3) * 1e-41,
        torch.arange(-42, 42).view(7, 12) / 2 * (127 / 21),
        torch.tensor([[65504.0, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25] * 2]) * torch.tensor([[1.0], [-1]]),
        torch.tensor([[1.00390625, 1.01171875, 3.4e38, -0.0] * 3]),
        torch.zeros(1, 12),
        torch.tensor([[1.0] * 11 + [value] for value in (float("nan"), float("inf"), float("-inf"), -float("nan"))]),
    ]
    numbers = torch.cat(heads).view(12, 3 * 12)
    qkv = torch.cat([torch.zeros(12, 12), numbers, -numbers.roll(1, 0)], dim=1)
    batch = batch_of([12], [12], block_size, 3)
    unturned = RopeTable(cos_PR2=torch.ones(12, 2), sin_PR2=torch.zeros(12, 2), interleaved=False)
    ours, reference = (kv_cache(shape, 3, block_size, dtype) for _ in range(2))
    compiled().rope_and_cache(qkv.clone(), unturned, batch, ours, shape)
    EXACT.rope_and_cache(qkv.clone(), unturned, batch, reference, shape)
    for actual, expected in zip(tensors_of(ours), tensors_of(reference), strict=True):
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))
    keys_GLD, _ = (x.transpose(0, 1) for x in keys_of(as_double(ours), batch, 0))
    assert not keys_GLD[:, -1].isfinite().all(dim=-1).any(), "a head that is not finite stays so"


def tensors_of(kv: KVLayer) -> list[Tensor]:
    return [kv.key_NHDB, kv.value_NHBD, *([] if kv.scales_NH2B is None else [kv.scales_NH2B])]


def test_rope_and_cache_refuses_positions_beyond_the_table_and_slots_beyond_the_cache() -> None:
    ops, shape = compiled(), SHAPES[0]
    qkv = randn(2, 24)
    batch = batch_of([2], [12], 4, 8)
    for positions, blocks in ((11, 8), (12, int(batch.block_tables.max()))):
        with pytest.raises(AssertionError, match="position or slot"):
            ops.rope_and_cache(qkv, rope_table(positions, 8, False), batch, kv_cache(shape, blocks, 4), shape)


@pytest.mark.parametrize("window", [0, 1, 5, 64, 100])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_attention(ops: Ops, shape: HeadShape, block_size: int, window: int) -> None:
    query_lens, kv_lens = [1, 1, 70, 3, 16, 1], [1, 64, 70, 131, 80, 600]
    num_blocks = sum(-(-n // block_size) for n in kv_lens) + 2
    batch = batch_of(query_lens, kv_lens, block_size, num_blocks)
    kv = kv_cache(shape, num_blocks, block_size)
    fill_cache(kv, batch, seed=5)
    qkv = randn(sum(query_lens), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim) * 2
    scoring = Scoring(scale=shape.head_dim**-0.5, window=window)
    actual = ops.paged_attention(qkv, kv, batch, shape, scoring)
    exact = EXACT.paged_attention(qkv.double(), as_double(kv), batch, shape, scoring)
    assert_close(actual, exact, 3e-6)


@pytest.mark.parametrize(("block_size", "chunk"), [(1, 5), (8, 64), (16, 1), (32, 100), (256, 4096)])
@pytest.mark.parametrize("shape", SHAPES[1::3], ids=str)
def test_chunks_are_windows_that_begin_where_they_do(ops: Ops, shape: HeadShape, block_size: int, chunk: int) -> None:
    query_lens, kv_lens = [1, 70, 3, 16], [64, 70, 131, 80]
    num_blocks = sum(-(-n // block_size) for n in kv_lens) + 2
    batch = batch_of(query_lens, kv_lens, block_size, num_blocks)
    kv = kv_cache(shape, num_blocks, block_size)
    fill_cache(kv, batch, seed=5)
    qkv = randn(sum(query_lens), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim) * 2
    scoring = Scoring(scale=shape.head_dim**-0.5, chunk=chunk)
    found = ops.paged_attention(qkv, kv, batch, shape, scoring)
    for row, position in enumerate(batch.positions_T.tolist()):
        window = replace(scoring, chunk=0, window=position % chunk + 1)
        assert torch.equal(found[row], ops.paged_attention(qkv, kv, batch, shape, window)[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_capped_scores(ops: Ops, cap: float, dtype: torch.dtype) -> None:
    """Below the cap and far above."""
    shape, query_lens, kv_lens = SHAPES[0], [1, 70, 3], [600, 70, 131]
    batch, kv = batch_of(query_lens, kv_lens, 16, 60), kv_cache(shape, 60, 16, dtype)
    fill_cache(kv, batch, seed=5)
    qkv = randn(74, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim) * 20
    scoring, uncapped = Scoring(scale=1.0, softcap=cap), Scoring(scale=1.0)
    exact, other = (
        EXACT.paged_attention(qkv.double(), as_double(kv), batch, shape, kind) for kind in (scoring, uncapped)
    )
    assert_close(ops.paged_attention(qkv, kv, batch, shape, scoring), exact, 1e-5)
    assert (exact - other).abs().max() > 0.1


@pytest.mark.parametrize("dtype", KV_TYPES[1:])
@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_attention_reads_every_storage_type(
    ops: Ops, shape: HeadShape, block_size: int, dtype: torch.dtype
) -> None:
    """The reference computes with what the stored numbers stand for."""
    query_lens, kv_lens = [1, 1, 70, 3, 16, 1], [1, 64, 70, 131, 80, 600]
    num_blocks = sum(-(-n // block_size) for n in kv_lens) + 2
    batch = batch_of(query_lens, kv_lens, block_size, num_blocks)
    kv = kv_cache(shape, num_blocks, block_size, dtype)
    fill_cache(kv, batch, seed=5)
    qkv = randn(sum(query_lens), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim) * 2
    for window in (0, 5):
        scoring = Scoring(scale=shape.head_dim**-0.5, window=window)
        actual = ops.paged_attention(qkv, kv, batch, shape, scoring)
        exact = EXACT.paged_attention(qkv.double(), as_double(kv), batch, shape, scoring)
        assert_close(actual, exact, 3e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sink", [-3.0, 4.0, 20.0])
def test_sinks_take_weight_from_the_keys(ops: Ops, sink: float, threads: int) -> None:
    """As a key without a value would; also where long contexts are shared by segments."""
    shape, before = HeadShape(num_heads=6, num_kv_heads=2, head_dim=16), torch.get_num_threads()
    batch, kv = batch_of([1, 3], [600, 131], 16, 60), kv_cache(shape, 60, 16)
    fill_cache(kv, batch, seed=5)
    qkv, sinks_H = randn(4, 160) * 2, torch.full((6,), sink) + randn(6)
    set_threads(threads)
    found = ops.paged_attention(qkv, kv, batch, shape, Scoring(scale=0.25, sinks_H=sinks_H))
    set_threads(before)
    without = EXACT.paged_attention(qkv.double(), as_double(kv), batch, shape, Scoring(scale=0.25))
    tables = batch.block_tables.split([38, 9])
    keys_GDL = [kv.key_NHDB[table].permute(1, 2, 0, 3).flatten(2).double() for table in tables]
    for row, (sequence, seen) in enumerate(((0, 600), (1, 129), (1, 130), (1, 131))):
        query_GxD = qkv[row, :96].view(2, 3, 16).double()
        total_H = (query_GxD @ keys_GDL[sequence][:, :, :seen] * 0.25).logsumexp(dim=-1).flatten()
        kept_H1 = (total_H - torch.logaddexp(total_H, sinks_H.double())).exp()[:, None]
        assert_close(found[row].view(6, 16), without[row].view(6, 16) * kept_H1, 3e-6)


IMAGES = [(2, 0, 5), (2, 20, 70), (3, 129, 131), (4, 60, 75), (5, 10, 600), (6, 200, 500)]
"""A step with spans of images at either end of it, and one of which all but the last row is in the cache already."""


@pytest.mark.parametrize(("block_size", "window"), [(1, 0), (8, 1), (16, 5), (256, 100), (16, 0), (256, 0)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_attention_within_images(ops: Ops, shape: HeadShape, block_size: int, window: int) -> None:
    """The formula written out, in float64: what a token sees is decided here key by key."""
    query_lens, kv_lens = [1, 1, 70, 3, 20, 1, 310], [1, 64, 70, 131, 80, 600, 510]
    num_blocks = sum(-(-n // block_size) for n in kv_lens) + 2
    batch = batch_of(query_lens, kv_lens, block_size, num_blocks, spans=IMAGES)
    kv = kv_cache(shape, num_blocks, block_size)
    fill_cache(kv, batch, seed=5)
    qkv = randn(sum(query_lens), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim) * 2
    scoring = Scoring(scale=shape.head_dim**-0.5, window=window)
    actual = ops.paged_attention(qkv, kv, batch, shape, scoring)
    row = 0
    for sequence, (queries, keys) in enumerate(zip(query_lens, kv_lens, strict=True)):
        sees = torch.zeros(queries, keys, dtype=torch.bool)
        for query, position in enumerate(range(keys - queries, keys)):
            sees[query, max(0, position + 1 - window) if window else 0 : position + 1] = True
            for owner, start, end in IMAGES:
                if owner == sequence and start <= position < end:
                    sees[query, position:end] = True
        expected = masked_attention(qkv[row : row + queries], keys_of(kv, batch, sequence), shape, sees)
        assert_close(actual[row : row + queries], expected, 3e-6)
        row += queries


def keys_of(kv: KVLayer, batch: Batch, sequence: int) -> tuple[Tensor, Tensor]:
    """Keys and values [L, G, D] of a sequence, gathered token by token."""
    position = torch.arange(int(batch.kv_lens_S[sequence]))
    table = batch.block_tables[int(batch.table_starts_S1[sequence]) :]
    block, offset = table[position // batch.block_size].long(), position % batch.block_size
    return kv.key_NHDB[block, :, :, offset], kv.value_NHBD[block, :, offset]


def masked_attention(qkv: Tensor, keys_values: tuple[Tensor, Tensor], shape: HeadShape, sees_QL: Tensor) -> Tensor:
    """[Q, H D] float64."""
    query_QHD = qkv[:, : shape.num_heads * shape.head_dim].unflatten(1, (shape.num_heads, -1)).double()
    first = shape.absent_heads[0]
    group_of_head = torch.arange(first, first + shape.num_heads) // shape.group_size
    key_LHD, value_LHD = (x.double()[:, group_of_head] for x in keys_values)
    scores_HQL = torch.einsum("qhd,lhd->hql", query_QHD, key_LHD) * shape.head_dim**-0.5
    weights_HQL = scores_HQL.masked_fill(~sees_QL, float("-inf")).softmax(dim=-1)
    return torch.einsum("hql,lhd->qhd", weights_HQL, value_LHD).flatten(1)


@pytest.mark.parametrize("end", [11, 13])
def test_paged_attention_refuses_keys_that_do_not_exist(end: int) -> None:
    ops, shape = compiled(), SHAPES[0]
    batch = replace(batch_of([2], [12], 4, 8), visible_ends_T=torch.tensor([11, end], dtype=torch.int32))
    with pytest.raises(AssertionError, match="keys that its sequence does not have"):
        ops.paged_attention(randn(2, 24), kv_cache(shape, 8, 4), batch, shape, Scoring(scale=1.0))


@pytest.mark.parametrize("block", [-1, 8])
def test_attention_refuses_blocks_that_do_not_exist(block: int) -> None:
    """Also of tokens that were computed before, to whose keys nothing is written."""
    ops, shape, batch = compiled(), SHAPES[0], batch_of([2], [12], 4, 8)
    tables = batch.block_tables.clone()
    tables[0] = block
    with pytest.raises(AssertionError, match="blocks that are not there"):
        ops.paged_attention(
            randn(2, 24), kv_cache(shape, 8, 4), replace(batch, block_tables=tables), shape, Scoring(scale=1.0)
        )
