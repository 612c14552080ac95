"""Memory in huge pages is memory: of the shape asked for, aligned, alive as long as a view of it."""

import gc
import mmap

import pytest
import torch

from model_runtime.huge_pages import HUGE_PAGE, huge_empty


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
