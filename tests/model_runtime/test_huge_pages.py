"""Memory in huge pages is memory: of the shape asked for, aligned, alive as long as a view of it."""

import gc
import mmap
from array import array
from pathlib import Path

import pytest
import torch

from model_runtime.caches import give_back
from model_runtime.huge_pages import HUGE_PAGE, huge_empty
from model_runtime.kv_store import allocate
from model_runtime.state_store import StateLayer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (1, HUGE_PAGE), (3, 1000, 1001)])
def test_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = huge_empty(shape, dtype)
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    assert tensor.is_contiguous()
    tensor.fill_(3)
    assert bool((tensor == 3).all())
    if tensor.nbytes >= HUGE_PAGE:
        assert tensor.data_ptr() % HUGE_PAGE == 0


def test_a_view_keeps_the_memory() -> None:
    view = huge_empty((HUGE_PAGE,), torch.float32).fill_(7)[-5:]
    gc.collect()
    assert view.tolist() == [7.0] * 5


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345, raising=False)
    assert huge_empty((HUGE_PAGE,), torch.int8).fill_(3).sum() == 3 * HUGE_PAGE


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's account of memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_blocks_give_their_memory_back(dtype: torch.dtype) -> None:
    """All but block 20 and its neighbours' shared pages; what it holds stays, and the others can be written again."""
    cpu = torch.device("cpu")
    kv = [
        allocate(num_blocks=64, num_kv_heads=4, head_dim=64, block_size=128, dtype=dtype, device=cpu) for _ in range(2)
    ]
    for layer in kv:
        layer.key_NHDB.fill_(7)
        layer.value_NHBD.fill_(9)
    pool_bytes = sum(pool.numel() * pool.element_size() for layer in kv for pool in (layer.key_NHDB, layer.value_NHBD))
    before = anonymous_bytes()
    give_back(kv, array("i", [*range(63, 20, -1), *range(20)]), array("i"))
    freed = before - anonymous_bytes()
    assert freed > 0.8 * pool_bytes, f"{freed} of {pool_bytes} bytes"
    for layer in kv:
        assert layer.key_NHDB[20].eq(7).all() and layer.value_NHBD[20].eq(9).all()
        assert layer.key_NHDB[40].eq(0).all()
        layer.key_NHDB[40].fill_(3)
        assert layer.key_NHDB[40].eq(3).all()


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's account of memory")
def test_states_give_their_memory_back() -> None:
    layer = StateLayer(huge_empty((8, 3, 2**15), torch.float32), huge_empty((8, 4, 128, 128), torch.float32))
    for pool in layer.by_slot:
        pool.fill_(7)
    pool_bytes, before = sum(pool.nbytes for pool in layer.by_slot), anonymous_bytes()
    give_back([layer], array("i"), array("i", [7, 6, 5, 4, 0, 1, 2]))
    assert before - anonymous_bytes() > 0.8 * pool_bytes
    for pool in layer.by_slot:
        assert pool[3].eq(7).all() and pool[6].eq(0).all()


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
