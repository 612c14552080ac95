"""When requests of an open loop are sent. Pure and seeded; used by `loadtest/runner.py`."""

import random
from typing import Literal

Arrival = Literal["poisson", "constant", "burst"]


def offsets(arrival: Arrival, rate: float, count: int, burst_size: int, rng: random.Random) -> list[float]:
    """Seconds after the start for each of `count` requests, `rate` a second on average; the first is at 0.

    `burst` sends groups of `burst_size` at one moment, and the groups come as a Poisson process.
    """
    if arrival == "constant":
        return [index / rate for index in range(count)]
    group = burst_size if arrival == "burst" else 1
    times: list[float] = []
    now = 0.0
    while len(times) < count:
        times += [now] * min(group, count - len(times))
        now += rng.expovariate(rate / group)
    return times
