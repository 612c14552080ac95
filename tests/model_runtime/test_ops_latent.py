"""Operations of latent attention: every implementation against the reference in float64; the reference against keys and
values that are made of the latents first; and of the compiled ones, that no row depends on its neighbours."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_runtime.architecture import LatentAttention
from model_runtime.batch import Batch
from model_runtime.caches import Caches, allocate_caches
from model_runtime.latent_store import LatentLayer
from model_runtime.memory.caches import cache_block_bytes
from model_runtime.ops import set_threads
from model_runtime.ops.registry import Ops
from model_runtime.stripes import Stripes, divided
from tests.model_runtime.memory import MODEL
from tests.model_runtime.op_cases import (
    CPU,
    EXACT,
    KV_TYPES,
    STORAGE_TYPES,
    assert_close,
    batch_of,
    batch_with_blocks,
    compiled,
    fill_with_nan,
    randn,
    rope_table,
)

SHAPES = [(4, 24, 8), (1, 512, 64), (16, 40, 6), (33, 72, 24), (7, 21, 4)]
"""Heads, latent rank, numbers of a row beside the latent."""


def cache(rank: int, shared: int, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32) -> LatentLayer:
    """Full of NaN: what was never written must not matter."""
    latent = LatentAttention(query_rank=0, latent_rank=rank, shared_dim=shared, value_dim=8, bias=False)
    config = replace(MODEL, num_layers=1, latent=latent)
    layers: Caches = allocate_caches(config, num_blocks, block_size, dtype, CPU)
    fill_with_nan(layers)
    (layer,) = layers
    assert isinstance(layer, LatentLayer)
    assert sum(pool.nbytes for pool in layer.pools) == num_blocks * cache_block_bytes(config, block_size, dtype)
    return layer


def as_double(kv: LatentLayer) -> LatentLayer:
    """What the stored numbers stand for."""
    blocks = torch.arange(kv.num_blocks)
    rows = kv.gather(blocks, kv.num_blocks * kv.block_size).double()
    return LatentLayer(rows.view(kv.rows_NBX.shape), kv.latent_rank)


def fill(kv: LatentLayer, batch: Batch, seed: int) -> None:
    """Random rows at every position that the batch's sequences have."""
    starts = batch.table_starts_S1.tolist()
    for s, kv_len in enumerate(batch.kv_lens_S.tolist()):
        position = torch.arange(kv_len)
        block = batch.block_tables[starts[s] + position // batch.block_size].long()
        rows = randn(kv_len, kv.rows_NBX.shape[2], seed=seed + s)
        kv.write(block * batch.block_size + position % batch.block_size, rows)


@pytest.mark.parametrize("dtype", STORAGE_TYPES)
@pytest.mark.parametrize(("tokens", "heads", "n", "k"), [(1, 5, 12, 16), (9, 3, 32, 70), (40, 2, 160, 512)])
def test_linear_heads(ops: Ops, dtype: torch.dtype, tokens: int, heads: int, n: int, k: int) -> None:
    """Into a part of wider rows, from a part of wider ones."""
    weight = randn(heads * n, k, seed=1).to(dtype)
    x, out = randn(tokens, heads, k + 3, seed=2), torch.full((tokens, heads, n + 5), 7.0)
    ops.linear_heads(x[..., 3:], ops.pack(weight), out[..., :n])
    exact = torch.einsum("thk,hnk->thn", x[..., 3:].double(), weight.double().view(heads, n, k))
    assert_close(out[..., :n], exact, 1e-6)
    assert (out[..., n:] == 7.0).all()


def test_a_row_of_linear_heads_is_the_same_in_every_batch() -> None:
    """Bit for bit, also where so many rows come that threads share a head."""
    ops, x = compiled(), randn(300, 2, 130, seed=3)
    weight, whole = ops.pack(randn(2 * 120, 130, seed=1)), torch.empty(300, 2, 120)
    ops.linear_heads(x, weight, whole)
    for start, stop in ((0, 1), (7, 40), (100, 299)):
        part = torch.empty(stop - start, 2, 120)
        ops.linear_heads(x[start:stop], weight, part)
        assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", KV_TYPES)
def test_rope_and_cache_latent(dtype: torch.dtype, interleaved: bool) -> None:
    """The last channels turn; rows are stored bit for bit as the reference stores them."""
    batch, (heads, rank, shared) = batch_of([5, 1, 20], [5, 30, 27], 8, 80), (3, 21, 12)
    query, row = randn(26, heads, rank + shared, seed=1), randn(26, rank + shared, seed=2) * 5
    exact_query, exact_row = query.double(), row.double()
    for rotated in (12, 4, 0):
        rope = rope_table(40, rotated, interleaved)
        ours, reference = (cache(rank, shared, 80, 8, dtype) for _ in range(2))
        compiled().rope_and_cache_latent(query, row, rope, batch, ours)
        EXACT.rope_and_cache_latent(exact_query, exact_row, rope, batch, cache(rank, shared, 80, 8))
        assert_close(query, exact_query, 1e-6)
        assert_close(row, exact_row, 1e-6)
        EXACT.rope_and_cache_latent(query.clone(), row.clone(), rope_table(40, 0, interleaved), batch, reference)
        for found, expected in zip(ours.pools, reference.pools, strict=True):
            assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(query[..., :rank], randn(26, heads, rank + shared, seed=1)[..., :rank])


def test_positions_and_slots_that_do_not_exist() -> None:
    ops, batch = compiled(), batch_of([2], [12], 4, 8)
    for positions, blocks in ((11, 8), (12, int(batch.block_tables.max()))):
        kv, rope = cache(8, 4, blocks, 4), rope_table(positions, 4, False)
        with pytest.raises(AssertionError, match="position or slot"):
            ops.rope_and_cache_latent(randn(2, 1, 12), randn(2, 12), rope, batch, kv)


@pytest.mark.parametrize("block", [-1, 8])
def test_blocks_that_do_not_exist(block: int) -> None:
    batch = batch_of([2], [12], 4, 8)
    tables = batch.block_tables.clone()
    tables[0] = block
    with pytest.raises(AssertionError, match="blocks that are not there"):
        compiled().latent_attention(randn(2, 3, 32), cache(24, 8, 8, 4), replace(batch, block_tables=tables), 1.0)


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_latent_attention(ops: Ops, shape: tuple[int, int, int], block_size: int, dtype: torch.dtype) -> None:
    heads, rank, shared = shape
    query_lens, kv_lens = [1, 1, 30, 3, 1], [1, 64, 30, 131, 600]
    num_blocks = sum(-(-n // block_size) for n in kv_lens) + 2
    batch, kv = (
        batch_of(query_lens, kv_lens, block_size, num_blocks),
        cache(rank, shared, num_blocks, block_size, dtype),
    )
    fill(kv, batch, seed=5)
    query = randn(sum(query_lens), heads, rank + shared) * 2
    actual = ops.latent_attention(query, kv, batch, (rank + shared) ** -0.5)
    exact = EXACT.latent_attention(query.double(), as_double(kv), batch, (rank + shared) ** -0.5)
    assert_close(actual, exact, 5e-6)


def test_absorbed_attention_is_that_over_keys_and_values_made_of_latents() -> None:
    """In float64: scores and values by matrices of each head, as DeepSeek-V2's paper defines them."""
    heads, rank, shared, plain, value_dim, kv_len, queries = 3, 20, 6, 10, 7, 50, 4
    batch, kv = batch_of([queries], [kv_len], 8, 9), as_double(cache(rank, shared, 9, 8))
    fill(kv, batch, seed=1)
    key_up, value_up = randn(heads, plain, rank, seed=2).double(), randn(heads, value_dim, rank, seed=3).double()
    query = randn(queries, heads, plain + shared, seed=4).double()
    rows = kv.gather(batch.block_tables, kv_len)
    keys = torch.cat(
        (torch.einsum("hpl,ml->mhp", key_up, rows[:, :rank]), rows[:, None, rank:].expand(-1, heads, -1)), 2
    )
    values = torch.einsum("hvl,ml->mhv", value_up, rows[:, :rank])
    hidden = torch.arange(kv_len) > torch.arange(kv_len - queries, kv_len)[:, None]
    scores = (torch.einsum("qhd,mhd->hqm", query, keys) * 0.3).masked_fill(hidden, -torch.inf)
    expected = torch.einsum("hqm,mhv->qhv", scores.softmax(-1), values)
    absorbed = torch.cat((torch.einsum("qhp,hpl->qhl", query[..., :plain], key_up), query[..., plain:]), dim=2)
    mixed = EXACT.latent_attention(absorbed, kv, batch, 0.3)
    assert (torch.einsum("qhl,hvl->qhv", mixed, value_up) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_parts_of_the_rows_come_to_the_whole(ops: Ops, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Three ranks with stripes of each sequence, of which some see nothing of a short one."""
    heads, rank, shared = shape
    query_lens, kv_lens, size, width = [1, 40, 3], [2, 61, 330], 3, 4
    batch, kv = batch_of(query_lens, kv_lens, size * width, 40), cache(rank, shared, 40, size * width, dtype)
    fill(kv, batch, seed=5)
    query = randn(sum(query_lens), heads, rank + shared, seed=6) * 2
    parts = []
    for member in range(size):
        shares = divided(batch, Stripes(member, size, width)).shared
        assert shares is not None
        own = slice(member * width, (member + 1) * width)
        scales = None if kv.scales_NB2 is None else kv.scales_NB2[:, own].contiguous()
        part = LatentLayer(kv.rows_NBX[:, own].contiguous(), rank, scales)
        states = ops.partial_latent_attention(query[shares.order_T], part, shares.keys, 0.2)
        parts.append(torch.empty_like(states).index_copy_(0, shares.order_T, states))
    merged = ops.merge_attention(torch.stack(parts)).view(len(query), heads, rank)
    assert_close(merged, EXACT.latent_attention(query.double(), as_double(kv), batch, 0.2), 5e-6)


def attended(
    length: int, chunk: int, others: list[int], block_size: int, heads: int = 6, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[length, heads, 24] of sequence 0, computed in steps of `chunk` tokens beside others that are computed whole."""
    ops, lengths, rope = compiled(), [length, *others], rope_table(length, 4, True)
    num_blocks = sum(-(-n // block_size) for n in lengths) + 3
    kv, full = cache(24, 8, num_blocks, block_size, dtype), batch_of(lengths, lengths, block_size, num_blocks, seed=3)
    tables = [table.tolist() for table in full.block_tables.tensor_split(full.table_starts_S1[1:-1].long())]
    queries = [randn(n, heads, 32, seed=s) * 2 for s, n in enumerate(lengths)]
    rows = [randn(n, 32, seed=100 + s) for s, n in enumerate(lengths)]
    found = []
    for done in range(0, length, chunk):
        stop = min(length, done + chunk)
        query_lens, kv_lens = [stop - done, *others], [stop, *others]
        blocks = tables[0][: -(-stop // block_size)] + [block for table in tables[1:] for block in table]
        batch = batch_with_blocks(query_lens, kv_lens, blocks, block_size)
        query = torch.cat([queries[0][done:stop], *queries[1:]])
        ops.rope_and_cache_latent(query, torch.cat([rows[0][done:stop], *rows[1:]]), rope, batch, kv)
        found.append(ops.latent_attention(query, kv, batch, 0.2)[: stop - done])
    return torch.cat(found)


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_a_row_is_the_same_however_it_is_computed(dtype: torch.dtype) -> None:
    """Bit for bit: by any number of threads, in any chunks, blocks and company."""
    before, length = torch.get_num_threads(), 530
    set_threads(1)
    whole = attended(length, length, [], 16, dtype=dtype)
    assert whole.isfinite().all()
    for threads, chunk, others, block_size in ((1, 7, [], 4), (2, 64, [300, 1, 17], 16), (3, 211, [40] * 12, 64)):
        set_threads(threads)
        assert torch.equal(attended(length, chunk, others, block_size, dtype=dtype), whole)
    last = attended(length, length - 1, [], 16, dtype=dtype)
    assert torch.equal(last, whole), "alone in its step, whose segments threads share"
    set_threads(before)


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_rows_after_the_query_are_never_added_in(dtype: torch.dtype) -> None:
    """Infinite rows written by later tokens of the same step must not reach the earlier ones."""
    ops, batch, kv = compiled(), batch_of([20], [20], 16, 2), cache(24, 8, 2, 16, dtype)
    fill(kv, batch, seed=1)
    query = randn(20, 3, 32)
    clean = ops.latent_attention(query, kv, batch, 1.0)
    pool = kv.rows_NBX if kv.scales_NB2 is None else kv.scales_NB2
    for slot in batch.slots_T[12:].tolist():
        pool[slot // 16, slot % 16] = float("inf")
    poisoned = ops.latent_attention(query, kv, batch, 1.0)
    assert torch.equal(poisoned[:12], clean[:12])
    assert not poisoned[12:].isfinite().any()
