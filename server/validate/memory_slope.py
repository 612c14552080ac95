"""Whether a process's memory grows with the requests that it served. Pure; used by soaks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LEAST_SAMPLES = 8
"""Of a process, for a slope."""


@dataclass
class Life:
    """A process: (requests that had ended, anonymous bytes), sample by sample."""

    samples: list[tuple[int, int]] = field(default_factory=list)

    def warm(self) -> NDArray[np.float64]:
        """Without the first third, in which pools and heaps fill, as differences from the mean: [N, 2]."""
        later = np.array(self.samples[len(self.samples) // 3 :], dtype=np.float64).reshape(-1, 2)
        return later - later.mean(axis=0) if len(later) else later


def slope(lives: Sequence[Life]) -> float:
    """Bytes for each request: the line through the warm samples of all lives, each from its own level."""
    points = np.concatenate([life.warm() for life in lives if len(life.samples) >= LEAST_SAMPLES] or [np.zeros((0, 2))])
    spread = float((points[:, 0] ** 2).sum())
    return float((points[:, 0] * points[:, 1]).sum()) / spread if spread else 0.0
