"""Memory in pages of 2 MiB for what every step reads from end to end: with the usual 4 KiB, looking up addresses takes
up to a third of the time of a step of one sequence. Used by the loader and the KV pool, engine and worker processes.

Linux gives such pages to whoever asks (madvise, transparent huge pages); elsewhere this is memory like any other.
"""

import ctypes
import math
import mmap
import os
import sys
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2**21


def huge_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on CPU whose content is not to be read before it is written. Pages are taken when they are first
    touched."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory for as long as a view of it lives
    start = -whole.data_ptr() % HUGE_PAGE
    end = start + num_bytes // HUGE_PAGE * HUGE_PAGE
    with suppress(OSError):  # a kernel built without them says that it does not know the word
        memory.madvise(mmap.MADV_HUGEPAGE, start, end - start)
        memory.madvise(mmap.MADV_NOHUGEPAGE, end)  # what a last one had beyond the tensor would be taken for nothing
    return whole[start : start + num_bytes].view(dtype).view(shape)


def trim_heap() -> None:
    """Give back to the system what the C library keeps of small tensors that are gone, where it is glibc."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def release_pages(part: Tensor) -> None:
    """Give the whole pages of a contiguous part of a large tensor back to the system; they read as zeros until they are
    written. Elsewhere than on Linux nothing happens."""
    if sys.platform != "linux":
        return
    start = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (part.data_ptr() + part.numel() * part.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
        assert not failed, f"madvise: {os.strerror(ctypes.get_errno())}"
