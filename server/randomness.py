"""Seeds: how a request's seed becomes the random stream of each of its choices. API process; pure.

The runtime's random numbers are a function of (stream, index of the output token), so a sequence that is continued
elsewhere draws the same numbers.
"""

import secrets

_MASK = (1 << 64) - 1


def fresh_seed() -> int:
    """A seed for a request that names none: uint64."""
    return secrets.randbits(64)


def mix_seed(seed: int, choice: int) -> int:
    """uint64 stream of a choice: the SplitMix64 finaliser (Steele et al., OOPSLA 2014) of seed + choice * gamma."""
    z = (seed + (choice + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
