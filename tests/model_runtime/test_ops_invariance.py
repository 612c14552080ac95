"""Batch invariance of the compiled operations, bit for bit: the number for a row does not depend on the other rows, its
place in the batch, the cut of the prompt into steps, the blocks it lies in, or the number of threads."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import torch
from torch import Tensor

from model_runtime.ops import set_threads
from model_runtime.ops.registry import Activation, HeadShape, Ops, Scoring
from tests.model_runtime.op_cases import (
    KV_TYPES,
    STORAGE_TYPES,
    Span,
    batch_of,
    batch_with_blocks,
    compiled,
    fill_cache,
    kv_cache,
    randn,
    rope_table,
)


@pytest.fixture(params=[2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """This many compute threads during a test, whatever the machine has."""
    before = torch.get_num_threads()
    set_threads(request.param)
    yield
    set_threads(before)


@pytest.mark.parametrize("dtype", STORAGE_TYPES)
@pytest.mark.parametrize(("n", "k"), [(70, 577), (16, 100), (40, 1100)])
def test_a_row_of_linear_is_the_same_in_every_batch(threads: None, dtype: torch.dtype, n: int, k: int) -> None:
    ops = compiled()
    weight, bias, x = ops.pack(randn(n, k, seed=1).to(dtype)), randn(n, seed=2), randn(300, k, seed=3)
    alone = torch.cat([ops.linear(x[i : i + 1], weight, bias) for i in range(len(x))])
    for rows in (*range(2, 41), 300):
        assert torch.equal(ops.linear(x[:rows], weight, bias), alone[:rows]), f"{rows} rows"
        shifted = x.roll(rows // 2, 0)[:rows].contiguous()
        assert torch.equal(ops.linear(shifted, weight, bias), alone.roll(rows // 2, 0)[:rows]), f"{rows} rows, shifted"


def test_a_row_of_the_row_operations_is_the_same_in_every_batch(threads: None) -> None:
    ops = compiled()
    x, weight = randn(300, 578, seed=1), randn(578, seed=2)
    operations: list[Callable[[Tensor], Tensor]] = [
        lambda rows: ops.rms_norm(rows, weight, 1e-5),
        lambda rows: ops.layer_norm(rows, weight, 1e-5),
    ]
    for operation in (*operations, ops.silu_mul, ops.gelu_tanh_mul):
        alone = torch.cat([operation(x[i : i + 1]) for i in range(len(x))])
        for rows in (2, 3, 17, 40, 300):
            assert torch.equal(operation(x[:rows]), alone[:rows])


@pytest.mark.parametrize("activation", get_args(Activation))
def test_a_number_is_activated_alike_wherever_it_stands(activation: Activation) -> None:
    """In torch it depends on whether a vector or the rest of one holds it."""
    ops, x, before = compiled(), randn(100_003) * 3, torch.get_num_threads()
    whole = ops.activate(x, activation)
    for threads in (1, 2, 3):
        set_threads(threads)
        assert torch.equal(ops.activate(x, activation), whole)
        for start, stop in ((1, 8), (5, 5000), (1023, 1033), (3, 100_003)):
            assert torch.equal(ops.activate(x[start:stop].clone(), activation), whole[start:stop])
    set_threads(before)


def run_layer(
    ops: Ops,
    shape: HeadShape,
    block_size: int,
    chunk: int,
    lengths: list[int],
    window: int,
    spans: Sequence[Span] = (),
    kv_type: torch.dtype = torch.float32,
) -> Tensor:
    """Outputs and cached values of sequences (number s is seeded by s) computed together in steps of `chunk` tokens, or
    more where a span would be cut, as they lie by position: [sum of lengths, (H + 2 G) D]."""
    num_blocks = sum(-(-n // block_size) for n in lengths) + 3
    kv = kv_cache(shape, num_blocks, block_size, kv_type)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    inputs = [randn(n, width, seed=s + 1) for s, n in enumerate(lengths)]
    outputs: list[list[Tensor]] = [[] for _ in lengths]
    full = batch_of(lengths, lengths, block_size, num_blocks, seed=len(lengths))
    tables = full.block_tables.tensor_split(full.table_starts_S1[1:-1].long())
    rope = rope_table(max(lengths), shape.head_dim, False)
    done = [0] * len(lengths)
    while running := [s for s, n in enumerate(lengths) if n > done[s]]:
        starts = [done[s] for s in running]
        for s in running:
            done[s] = min(lengths[s], done[s] + chunk)
            done[s] = max([done[s], *(end for owner, start, end in spans if owner == s and start < done[s] < end)])
        blocks = [tables[s][: -(-done[s] // block_size)] for s in running]
        query_lens = [done[s] - start for s, start in zip(running, starts, strict=True)]
        held = [(running.index(s), start, end) for s, start, end in spans if s in running]
        batch = batch_with_blocks(query_lens, [done[s] for s in running], torch.cat(blocks).tolist(), block_size, held)
        qkv = torch.cat([inputs[s][start : done[s]] for s, start in zip(running, starts, strict=True)])
        ops.rope_and_cache(qkv, rope, batch, kv, shape)
        out = ops.paged_attention(qkv, kv, batch, shape, Scoring(scale=0.125, window=window))
        both = torch.cat([out, qkv[:, shape.num_heads * shape.head_dim :]], dim=1)
        for s, rows in zip(running, both.split(query_lens), strict=True):
            outputs[s].append(rows)
    return torch.cat([rows for parts in outputs for rows in parts])


@pytest.mark.parametrize("threads", [1], indirect=True)  # hundreds of steps: quick on a busy machine too
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(
    "shape", [HeadShape(num_heads=6, num_kv_heads=2, head_dim=16), HeadShape(num_heads=5, num_kv_heads=1, head_dim=24)]
)
def test_attention_is_the_same_for_every_cut_of_the_prompt(
    threads: None, shape: HeadShape, block_size: int, window: int
) -> None:
    ops, length = compiled(), 330
    whole = run_layer(ops, shape, block_size, length, [length], window)
    assert whole.isfinite().all()
    for chunk in (1, 7, 64):
        assert torch.equal(run_layer(ops, shape, block_size, chunk, [length], window), whole), f"chunks of {chunk}"


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("block_size", [4, 16])
def test_attention_within_images_is_the_same_for_every_cut_and_changes_no_other_row(
    threads: None, block_size: int, window: int
) -> None:
    ops, length = compiled(), 600
    shape = HeadShape(num_heads=6, num_kv_heads=2, head_dim=16)
    spans = [(0, 5, 70), (0, 70, 71), (0, 90, 110), (0, 200, 540)]
    whole = run_layer(ops, shape, block_size, length, [length], window, spans)
    for chunk in (1, 7, 64):
        assert torch.equal(run_layer(ops, shape, block_size, chunk, [length], window, spans), whole), f"chunk {chunk}"
    among = run_layer(ops, shape, block_size, 100, [length, 40, 333], window, [*spans, (2, 0, 300)])
    assert torch.equal(among[:length], whole)
    text = run_layer(ops, shape, block_size, length, [length], window)
    inside = torch.zeros(length, dtype=torch.bool)
    for _, start, end in spans:
        inside[start : end - 1] = True  # the last row of a span sees nothing that it would not see anyhow
    assert torch.equal(whole[~inside], text[~inside])
    assert (whole[inside] != text[inside]).any(dim=1).all()


def test_attention_of_a_sequence_is_the_same_among_others_and_in_other_blocks(threads: None) -> None:
    ops, shape = compiled(), HeadShape(num_heads=6, num_kv_heads=2, head_dim=16)
    alone = run_layer(ops, shape, 16, 32, [300], 0)
    for block_size, others in ((16, [5]), (16, [290, 300, 1, 17]), (8, [64] * 12), (64, [280])):
        assert torch.equal(run_layer(ops, shape, block_size, 32, [300, *others], 0)[:300], alone)


@pytest.mark.parametrize("kv_type", KV_TYPES[1:])
def test_attention_is_the_same_however_its_keys_are_stored_and_read(threads: None, kv_type: torch.dtype) -> None:
    """In place or expanded first: with the number of queries, the size of blocks and the neighbours that changes."""
    ops, length = compiled(), 330
    for shape in (
        HeadShape(num_heads=6, num_kv_heads=2, head_dim=16),
        HeadShape(num_heads=5, num_kv_heads=1, head_dim=24),
    ):
        for window in (0, 40):
            whole = run_layer(ops, shape, 16, length, [length], window, kv_type=kv_type)
            assert whole.isfinite().all()
            for block_size, chunk, others in ((16, 7, []), (16, 3, [300]), (4, 64, [5, 17]), (64, 100, [290])):
                among = run_layer(ops, shape, block_size, chunk, [length, *others], window, kv_type=kv_type)
                assert torch.equal(among[:length], whole), f"blocks of {block_size}, chunks of {chunk}"


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    ops, shape = compiled(), HeadShape(num_heads=6, num_kv_heads=2, head_dim=16)
    x, weight = randn(33, 600, seed=1), ops.pack(randn(77, 600, seed=2))
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        set_threads(threads)
        linear = [ops.linear(x[:rows].contiguous(), weight, None) for rows in (1, 2, 33)]
        rows = [ops.rms_norm(x.repeat(4, 1), x[0], 1e-5), ops.silu_mul(x.repeat(4, 1))]
        attention = [
            run_layer(ops, shape, 16, chunk, [520, 40], 0, kv_type=kv_type)
            for chunk in (40, 520)
            for kv_type in KV_TYPES
        ]
        results.append([*linear, *rows, *attention])
    set_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_two_callers_at_once_get_their_own_results(threads: None) -> None:
    """One has the thread pool, the other works alone."""
    ops, shape = compiled(), HeadShape(num_heads=6, num_kv_heads=2, head_dim=16)
    weight, x = ops.pack(randn(400, 300, seed=1)), [randn(20, 300, seed=i) for i in range(40)]
    batch = batch_of([200], [200], 16, 13)
    kv, qkv = kv_cache(shape, 13, 16), randn(200, 160)
    fill_cache(kv, batch, seed=1)

    def both(rows: Tensor) -> Tensor:
        attended = ops.paged_attention(qkv, kv, batch, shape, Scoring(scale=0.25))
        return torch.cat([ops.linear(rows, weight, None).flatten(), attended.flatten()])

    expected = [both(rows) for rows in x]
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(a, b) for a, b in zip(pool.map(both, x), expected, strict=True))


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_keys_after_the_query_are_never_added_in(kv_type: torch.dtype) -> None:
    """Infinite keys and values written by later tokens of the same step must not reach the earlier ones."""
    ops, shape = compiled(), HeadShape(num_heads=2, num_kv_heads=1, head_dim=8)
    batch = batch_of([20], [20], 16, 2)
    kv, qkv = kv_cache(shape, 2, 16, kv_type), randn(20, 32)
    fill_cache(kv, batch, seed=1)
    clean = ops.paged_attention(qkv, kv, batch, shape, Scoring(scale=1.0))
    for slot in batch.slots_T[12:].tolist():
        if kv.scales_NH2B is not None:
            kv.scales_NH2B[slot // 16, :, :, slot % 16] = float("inf")
            continue
        kv.key_NHDB[slot // 16, :, :, slot % 16] = float("inf")
        kv.value_NHBD[slot // 16, :, slot % 16] = float("inf")
    poisoned = ops.paged_attention(qkv, kv, batch, shape, Scoring(scale=1.0))
    assert torch.equal(poisoned[:12], clean[:12])
    assert not poisoned[12:].isfinite().any()
