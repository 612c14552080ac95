"""Random numbers as functions of seed and counter: published values, and that they look random."""

import numpy as np

from model_runtime.random import philox, uniform


def test_philox_known_answers() -> None:
    """The published vectors of philox4x32-10 (Random123, kat_vectors)."""

    def run(counter: list[int], key: list[int]) -> list[int]:
        words = [np.array([word], dtype=np.uint64) for word in counter + key]
        return [int(word[0]) for word in philox(tuple(words[:4]), tuple(words[4:]))]

    assert run([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert run([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert run(pi, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_uniform_is_uniform_and_seeds_differ() -> None:
    counters = np.arange(50_000, dtype=np.uint64)
    for seed in (0, 1, 2**64 - 1):
        u = uniform(np.full_like(counters, seed), counters)
        assert 0 <= u.min() < 1e-3
        assert 0.999 < u.max() < 1
        histogram = np.histogram(u, bins=100, range=(0, 1))[0]
        chi_squared = ((histogram - 500) ** 2 / 500).sum()
        assert chi_squared < 160, "99 degrees of freedom: p < 1e-4"
    first, second = (uniform(np.full_like(counters, seed), counters) for seed in (8, 9))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
