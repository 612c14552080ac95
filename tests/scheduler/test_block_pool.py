"""Blocks are free, cached or referenced; the oldest cached one is evicted first."""

import pytest

from scheduler.block_pool import BlockPool


def test_states_add_up_and_lru_order_is_kept() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, evicted.append)
    a, b, c, d = (pool.allocate() for _ in range(4))
    assert sorted((a, b, c, d)) == [0, 1, 2, 3]
    for block in (b, a, c):
        pool.release(block, keep=True)
    pool.release(d, keep=False)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (1, 3, 4)
    pool.retain(a)  # from the middle of the LRU
    assert pool.num_cached == 2
    assert [pool.allocate() for _ in range(3)] == [d, b, c]
    assert evicted == [b, c]
    pool.check([1, 1, 1, 1], lambda block: False)


def test_shared_block_is_kept_until_its_last_user_leaves() -> None:
    pool = BlockPool(1, lambda block: None)
    block = pool.allocate()
    pool.retain(block)
    pool.release(block, keep=True)
    assert (pool.references(block), pool.num_available) == (1, 0)
    pool.release(block, keep=True)
    assert (pool.references(block), pool.num_cached) == (0, 1)


def test_misuse_is_loud() -> None:
    pool = BlockPool(1, lambda block: None)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="no block is available"):
        pool.allocate()
    pool.release(block, keep=False)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block, keep=False)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([1], lambda block: False)
