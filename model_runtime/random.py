"""Counter-based random numbers: a pure function of (seed, counter). Called by the sampler, in the engine process.

There is no state to save, restore or share, so a sequence draws the same numbers alone, in any batch, after a
preemption and after a restart. The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011), in numpy's uint64 arithmetic.

Legend: R independent draws.
"""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)

Words = tuple[NDArray[np.uint64], ...]


def philox(counter: Words, key: Words) -> Words:
    """Philox 4x32-10: four counter words and two key words to four random words, each a uint64 array that holds a
    32-bit word."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & WORD, (p0 >> HALF) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def uniform(seed_R: NDArray[np.uint64], counter_R: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), multiples of 2^-52: the first 52 bits of Philox at counter (low, high, 0, 0) and key
    (seed's low word, seed's high word)."""
    zero_R = np.zeros_like(counter_R)
    counter = (counter_R & WORD, counter_R >> HALF, zero_R, zero_R)
    first_R, second_R, _, _ = philox(counter, (seed_R & WORD, seed_R >> HALF))
    bits_R = ((first_R << HALF) | second_R) >> np.uint64(12)
    return bits_R.astype(np.float64) * 2.0**-52
