"""Positions dealt to ranks in stripes, and attention of all rows over the keys of all ranks, part by part."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_runtime.batch import Batch, ImageRows, KeyRanges
from model_runtime.kv_store import KVLayer
from model_runtime.ops.registry import HeadShape, Ops, Scoring
from model_runtime.stripes import Stripes, divided
from tests.model_runtime.op_cases import (
    EXACT,
    KV_TYPES,
    Span,
    as_double,
    assert_close,
    batch_of,
    compiled,
    fill_cache,
    kv_cache,
    randn,
)
from tests.model_runtime.test_ops_attention import IMAGES

SHAPES = [HeadShape(num_heads=6, num_kv_heads=2, head_dim=64), HeadShape(num_heads=5, num_kv_heads=1, head_dim=20)]
QUERIES, KEYS = [1, 1, 70, 3, 20, 1, 310], [1, 64, 70, 131, 80, 600, 510]
SCORING = Scoring(scale=0.125)


def step(size: int, width: int, spans: list[Span] | None = None) -> tuple[Batch, int]:
    """A step, and the number of blocks that it needs."""
    num_blocks = sum(-(-n // (size * width)) for n in KEYS)
    return batch_of(QUERIES, KEYS, size * width, num_blocks, spans=spans or []), num_blocks


def own_cache(kv: KVLayer, stripes: Stripes) -> KVLayer:
    """A rank's part of every block."""
    part = slice(stripes.rank * stripes.width, (stripes.rank + 1) * stripes.width)
    scales = None if kv.scales_NH2B is None else kv.scales_NH2B[..., part].contiguous()
    return KVLayer(kv.key_NHDB[..., part].contiguous(), kv.value_NHBD[:, :, part].contiguous(), scales)


def ranges(batch: Batch, stripes: Stripes, window: int) -> tuple[KeyRanges, Tensor]:
    """What all rows see of a rank's keys, and which rows of the step they are."""
    shared = divided(batch, stripes).shared
    assert shared is not None
    begins_T = (shared.positions_T + 1 - window if window else torch.zeros_like(shared.positions_T)).clamp(min=0)
    return replace(shared.keys, begins_T=stripes.before(begins_T)), shared.order_T


def attention(ops: Ops, qkv: Tensor, kv: KVLayer, batch: Batch, shape: HeadShape, window: int, size: int) -> Tensor:
    """Of all rows, from the states that each rank makes."""
    states, order_T = [], torch.empty(0)
    for rank in range(size):
        stripes = Stripes(rank, size, batch.block_size // size)
        keys, order_T = ranges(batch, stripes, window)
        query = qkv[order_T, : shape.num_heads * shape.head_dim].contiguous()
        states.append(ops.partial_attention(query, own_cache(kv, stripes), keys, shape, SCORING))
    merged_TC = ops.merge_attention(torch.stack(states))
    return torch.empty_like(merged_TC).index_copy_(0, order_T, merged_TC)


def test_every_position_has_one_owner_and_one_place() -> None:
    positions = torch.arange(200, dtype=torch.int32)
    for size, width in ((1, 16), (2, 4), (3, 1), (3, 16)):
        ranks = [Stripes(rank, size, width) for rank in range(size)]
        owners = ranks[0].owners(positions)
        assert owners[:: size * width].tolist() == [0] * len(owners[:: size * width])
        for stripes in ranks:
            own = (owners == stripes.rank).nonzero().flatten()
            assert stripes.before(positions[own]).tolist() == list(range(len(own)))
            assert torch.equal(stripes.own_slots(positions[own]), stripes.before(positions[own]))
            assert [int((own < end).sum()) for end in positions] == stripes.before(positions).tolist()


def test_a_step_is_divided_by_position() -> None:
    batch, _ = step(2, 4)
    embeddings = randn(5, 3)
    images = (ImageRows(start=4, embeddings_NC=embeddings, deepstack_NC=(2 * embeddings,)),)
    batch = replace(batch, token_ids_T=torch.arange(batch.num_tokens, dtype=torch.int32), images=images)
    parts = [divided(batch, Stripes(rank, 2, 4)) for rank in range(2)]
    for rank, part in enumerate(parts):
        assert part.shared is not None and part.block_size == 4
        assert part.shared.counts_N.tolist() == [part.num_tokens for part in parts]
        assert part.shared.order_T.split(part.shared.counts_N.tolist())[rank].tolist() == part.token_ids_T.tolist()
        assert (part.positions_T // 4 % 2 == rank).all()
        own = [row for row in range(4, 9) if int(batch.positions_T[row]) // 4 % 2 == rank]
        (image,) = part.images
        assert part.token_ids_T[image.start : image.start + len(own)].tolist() == own
        assert torch.equal(image.embeddings_NC, embeddings[[row - 4 for row in own]])
        assert torch.equal(image.deepstack_NC[0], 2 * image.embeddings_NC)
    assert parts[0].kv_lens_S.tolist() == [1, 32, 36, 67, 40, 300, 256]
    assert (parts[0].kv_lens_S + parts[1].kv_lens_S).tolist() == KEYS


@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize(("size", "width"), [(2, 8), (2, 16), (3, 16)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_in_parts_is_attention(ops: Ops, shape: HeadShape, size: int, width: int, window: int) -> None:
    for spans in ([], IMAGES):
        batch, num_blocks = step(size, width, spans)
        kv = kv_cache(shape, num_blocks, size * width)
        fill_cache(kv, batch, seed=5)
        qkv = randn(sum(QUERIES), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim) * 2
        exact = EXACT.paged_attention(qkv.double(), as_double(kv), batch, shape, replace(SCORING, window=window))
        assert_close(attention(ops, qkv, kv, batch, shape, window, size), exact, 3e-6)


@pytest.mark.parametrize("dtype", KV_TYPES[1:])
def test_parts_are_read_as_they_are_stored(ops: Ops, dtype: torch.dtype) -> None:
    shape = SHAPES[0]
    batch, num_blocks = step(2, 16)
    kv = kv_cache(shape, num_blocks, 32, dtype)
    fill_cache(kv, batch, seed=5)
    qkv = randn(sum(QUERIES), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    exact = EXACT.paged_attention(qkv.double(), as_double(kv), batch, shape, SCORING)
    assert_close(attention(ops, qkv, kv, batch, shape, 0, 2), exact, 3e-6)


def test_a_key_that_is_not_finite_shows() -> None:
    shape, ops = SHAPES[0], compiled()
    batch, num_blocks = step(2, 16)
    kv = kv_cache(shape, num_blocks, 32)
    fill_cache(kv, batch, seed=5)
    kv.key_NHDB[int(batch.block_tables[int(batch.table_starts_S1[6])]), 0, 0, 3] = torch.nan
    qkv = randn(sum(QUERIES), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    finite = attention(ops, qkv, kv, batch, shape, 0, 2).isfinite().all(dim=1)
    assert not finite[-QUERIES[6] :].any() and finite[: -QUERIES[6]].all()


def test_keys_that_do_not_exist_are_refused() -> None:
    shape, ops = SHAPES[0], compiled()
    batch, num_blocks = step(2, 16)
    stripes = Stripes(0, 2, 16)
    keys, order_T = ranges(batch, stripes, 0)
    query, kv = randn(len(order_T), 6 * 64), kv_cache(shape, num_blocks, 16)
    for name, wrong in (("ends_T", keys.ends_T + 400), ("begins_T", keys.begins_T - 1), ("begins_T", keys.ends_T + 1)):
        with pytest.raises(AssertionError, match="keys that its sequence does not have"):
            ops.partial_attention(query, kv, replace(keys, **{name: wrong}), shape, SCORING)
    with pytest.raises(AssertionError, match="blocks that are not there"):
        ops.partial_attention(query, kv, replace(keys, block_tables=keys.block_tables + num_blocks), shape, SCORING)
