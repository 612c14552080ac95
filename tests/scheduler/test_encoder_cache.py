"""Embeddings within a byte budget: pinned ones stay, of the others the oldest goes first."""

import pytest

from scheduler.encoder_cache import EncoderCache, EncoderLimits

A, B, C = b"a", b"b", b"c"


def _cache(cache_bytes: int = 100) -> EncoderCache:
    return EncoderCache(EncoderLimits(cache_bytes=cache_bytes, bytes_per_embedding=10))


def test_eviction_takes_unpinned_ones_in_the_order_of_their_release() -> None:
    cache = _cache()
    assert [cache.insert(key, 3) for key in (A, B, C)] == [0, 1, 2]
    assert (cache.num_bytes, cache.insert(b"d", 2)) == (90, None)
    cache.unpin(B)
    cache.unpin(A)
    assert cache.take_drops().tolist() == []
    assert cache.insert(b"d", 4) == 1  # B's slot
    assert (cache.take_drops().tolist(), cache.take_drops().tolist(), cache.num_bytes) == ([1], [], 100)
    assert (cache.pin(A), cache.pin(B), cache.slot(A)) == (True, False, 0)
    cache.check({A: 1, C: 1, b"d": 1})


def test_what_cannot_fit_evicts_nothing() -> None:
    cache = _cache()
    cache.insert(A, 5)
    cache.insert(B, 5)
    cache.unpin(A)
    assert cache.insert(C, 6) is None
    assert (cache.take_drops().tolist(), cache.pin(A)) == ([], True)


def test_every_pin_counts() -> None:
    cache = _cache()
    cache.insert(A, 10)
    cache.pin(A)
    cache.unpin(A)
    assert cache.insert(B, 1) is None
    cache.check({A: 1})
    cache.unpin(A)
    assert cache.insert(B, 1) == 0


def test_forgotten_slot_is_not_dropped() -> None:
    cache = _cache()
    cache.insert(A, 10)
    cache.unpin(A)
    assert (cache.forget(A), cache.num_bytes, cache.pin(A), cache.take_drops().tolist()) == (0, 0, False, [])
    assert cache.insert(A, 10) == 0


def test_misuse_is_loud() -> None:
    cache = _cache()
    cache.insert(A, 1)
    with pytest.raises(AssertionError, match="encoded twice"):
        cache.insert(A, 1)
    cache.unpin(A)
    with pytest.raises(AssertionError, match="unpinned more often"):
        cache.unpin(A)
    with pytest.raises(AssertionError, match="pins are miscounted"):
        cache.check({A: 1})
