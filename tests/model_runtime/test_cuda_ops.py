"""The operations of GPUs against the reference in float64: on a GPU, and on CPU with a stand-in for flash attention."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.device_batch import upload
from model_runtime.kv_store import KVLayer, allocate
from model_runtime.ops.registry import HeadShape, Ops, Scoring, select
from model_runtime.quantized import QuantizedFormat, dequantize, quantize
from tests.model_runtime.flash import token_major
from tests.model_runtime.op_cases import (
    CPU,
    EXACT,
    as_double,
    assert_close,
    batch_of,
    fill_cache,
    kv_cache,
    randn,
    rope_table,
)

OPS = select("cuda")
EPS = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
HALVES = [torch.bfloat16, torch.float16]
SHAPE = HeadShape(num_heads=6, num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize("stored", [torch.float32, *HALVES])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_linear(device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> None:
    x, weight, bias = randn(5, 257, seed=1).to(dtype), randn(100, 257, seed=2).to(stored), randn(100, seed=3)
    exact = x.double() @ weight.double().T + bias.double()
    found = OPS.linear(x.to(device), OPS.pack(weight.to(device)), bias.to(device))
    assert found.dtype == dtype
    assert_close(found, exact, 2 * EPS[dtype])


@pytest.mark.parametrize("stored", ["q4_0", "q4_0_128"])
def test_integers_are_expanded_and_rows_are_never_quantised(device: torch.device, stored: QuantizedFormat) -> None:
    x, matrix = randn(5, 160, seed=1), quantize(randn(40, 160, seed=2), stored)
    packed = OPS.pack_quantized(replace(matrix, data_NR=matrix.data_NR.to(device)), 16)
    assert_close(OPS.linear(x.to(device), packed, None), x.double() @ dequantize(matrix).double().T, 1e-6)
    ids = torch.tensor([3, 39, 3], dtype=torch.int32)
    assert torch.equal(OPS.embedding(ids.to(device), packed).cpu(), dequantize(matrix)[ids])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_rows_are_quantised_to_8_bits_where_that_is_asked_for(device: torch.device, dtype: torch.dtype) -> None:
    x, matrix = randn(5, 64, seed=1).to(dtype), quantize(randn(40, 64, seed=2), "q8_0")
    packed = OPS.pack_quantized(replace(matrix, data_NR=matrix.data_NR.to(device)), 8)
    found, exact = OPS.linear(x.to(device), packed, None), EXACT.pack_quantized(matrix, 8)
    assert found.dtype == dtype
    assert_close(found, EXACT.linear(x.double(), exact, None), EPS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_rms_norm(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = (randn(7, 96, seed=1) * 5).to(dtype), randn(96, seed=2)
    found = OPS.rms_norm(x.to(device), weight.to(device), 1e-5)
    assert found.dtype == dtype
    assert_close(found, EXACT.rms_norm(x.double(), weight.double(), 1e-5), EPS[dtype])


@pytest.mark.parametrize("dtype", HALVES)
def test_rotations_are_computed_in_float32(dtype: torch.dtype) -> None:
    batch, qkv = batch_of([20], [500], 256, 2), randn(20, 640).to(dtype)
    exact, rope = qkv.double(), rope_table(500, 64, False)
    kv = kv_cache(SHAPE, 2, 256)
    OPS.rope_and_cache(qkv, rope, batch, token_major(kv, dtype), SHAPE)
    EXACT.rope_and_cache(exact, rope, batch, as_double(kv), SHAPE)
    assert_close(qkv, exact, EPS[dtype] / 2)


def test_memory_of_a_gpu_is_token_by_token(device: torch.device) -> None:
    where = torch.device("meta") if device.type == "cpu" else device
    size = {"num_blocks": 3, "num_kv_heads": 2, "head_dim": 8, "block_size": 256}
    layer = allocate(**size, dtype=torch.bfloat16, device=where)
    assert layer.key_NHDB.shape == (3, 2, 8, 256) and layer.value_NHBD.shape == (3, 2, 256, 8)
    assert layer.key_NBHD.is_contiguous() and layer.value_NBHD.is_contiguous()
    on_cpu = allocate(**size, dtype=torch.float32, device=CPU)
    assert on_cpu.key_NHDB.is_contiguous() and on_cpu.value_NHBD.is_contiguous()


def test_both_layouts_hold_the_same(device: torch.device) -> None:
    batch, qkv, rope = batch_of([5, 1, 20], [5, 300, 270], 256, 8), randn(26, 640), rope_table(300, 64, False)
    kv = kv_cache(SHAPE, 8, 256)
    other = token_major(kv, torch.float32)
    for layer in (kv, other):
        EXACT.rope_and_cache(qkv.clone(), rope, batch, layer, SHAPE)
    assert other.key_NBHD.is_contiguous()
    assert torch.equal(kv.key_NHDB.nan_to_num(7), other.key_NHDB.nan_to_num(7))
    assert torch.equal(kv.value_NHBD.nan_to_num(7), other.value_NHBD.nan_to_num(7))


# Attention


def attention(
    ops: Ops, batch: Batch, kv: KVLayer, shape: HeadShape, window: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What the operation gives for a batch in host memory, and the reference's answer to the same rounded numbers."""
    qkv = (randn(batch.num_tokens, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim) * 2).to(dtype)
    rounded = token_major(kv, dtype)
    moved = token_major(KVLayer(rounded.key_NHDB.to(device), rounded.value_NHBD.to(device)), dtype)
    scoring = Scoring(scale=shape.head_dim**-0.5, window=window)
    actual = ops.paged_attention(qkv.to(device), moved, upload(batch, device), shape, scoring)
    exact = EXACT.paged_attention(qkv.double(), as_double(rounded), batch, shape, scoring)
    return actual, exact


def filled(batch: Batch, shape: HeadShape, num_blocks: int) -> KVLayer:
    kv = kv_cache(shape, num_blocks, batch.block_size)
    fill_cache(kv, batch, seed=5)
    return kv


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [0, 1, 5, 300])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 80), (8, 1, 128), (2, 1, 256)])
@pytest.mark.parametrize(
    ("query_lens", "kv_lens"), [([1, 1, 70, 3, 16, 1], [1, 64, 70, 331, 80, 600]), ([1, 1, 1], [700, 256, 1])]
)
def test_paged_attention(
    device: torch.device,
    query_lens: list[int],
    kv_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int,
    dtype: torch.dtype,
) -> None:
    shape = HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    batch = batch_of(query_lens, kv_lens, 256, 12)
    actual, exact = attention(OPS, batch, filled(batch, shape, 12), shape, window, dtype, device)
    assert actual.dtype == dtype
    assert_close(actual, exact, 2 * EPS[dtype])


@pytest.mark.gpu
def test_a_sequence_alone_and_among_others_attends_to_the_same_bits() -> None:
    """One split of the keys: the order of sums hangs on the sequence alone."""
    dtype, device = torch.bfloat16, torch.device("cuda")
    together = batch_of([1, 1, 1], [700, 256, 40], 256, 12)
    kv = filled(together, SHAPE, 12)
    all_rows, _ = attention(OPS, together, kv, SHAPE, 0, dtype, device)
    alone = replace(
        together,
        token_ids_T=together.token_ids_T[:1],
        query_starts_S1=together.query_starts_S1[:2],
        kv_lens_S=together.kv_lens_S[:1],
        block_tables=together.block_tables[:3],
        table_starts_S1=together.table_starts_S1[:2],
    )
    first_row, _ = attention(OPS, alone, kv, SHAPE, 0, dtype, device)
    assert torch.equal(all_rows[:1], first_row)


@pytest.mark.parametrize(
    ("dtype", "block_size", "head_dim"), [(torch.float32, 256, 64), (torch.bfloat16, 16, 64), (torch.bfloat16, 256, 20)]
)
def test_the_reference_attends_where_flash_attention_cannot(
    device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
) -> None:
    shape = HeadShape(num_heads=6, num_kv_heads=2, head_dim=head_dim)
    batch = batch_of([1, 30], [64, 70], block_size, 12)
    actual, exact = attention(OPS, batch, filled(batch, shape, 12), shape, 9, dtype, device)
    assert_close(actual, exact, 3e-6 if dtype == torch.float32 else EPS[dtype])


def test_the_reference_attends_within_images(device: torch.device) -> None:
    batch = batch_of([70, 1], [70, 64], 256, 4, spans=[(0, 20, 60)])
    actual, exact = attention(OPS, batch, filled(batch, SHAPE, 4), SHAPE, 0, torch.bfloat16, device)
    assert_close(actual, exact, EPS[torch.bfloat16])
