"""What a rank of the engine has done so far, as the engine tells it and /metrics shows it. This module does not import
torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """Sums since the rank started."""

    rank: int
    steps: int
    step_seconds: float
    collectives: int
    sent_bytes: int
    collective_seconds: float
    waiting_seconds: float
    """Of `collective_seconds`, until the last rank had come; 0 where the backend does not tell."""
    expert_tokens: int
    """Tokens that this rank's experts computed, each token counted once for each of its experts here."""
