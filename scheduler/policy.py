"""Who goes first: order of the running and the waiting, share of the prompts in a step.

Pure functions used by `Scheduler`, engine process.
"""

from scheduler.sequence import Sequence

MAX_OVERTAKES = 64
"""Sequences that may be admitted before one that finds too few KV blocks; then all wait until it runs."""

MAX_BLOCKED = 16
"""Sequences without enough KV blocks that are looked past in a step."""

MAX_PROMPTS = 8
"""Prompts that are computed side by side when one alone fills the step: short ones need not wait behind long ones."""


def rank(seq: Sequence) -> tuple[int, int]:
    """Order of running sequences, best first: priority, then age. The last one is the first to be preempted."""
    return seq.request.priority, seq.arrival


def queue_rank(seq: Sequence) -> tuple[int, bool, int]:
    """Order of waiting sequences: priority, then those that were preempted, then age."""
    return seq.request.priority, not seq.preempted, seq.arrival


def split_share(prompts: list[Sequence], share: int) -> list[tuple[Sequence, int]]:
    """Divide `share` tokens among sequences with prompts to compute, best priority and fewest tokens first.

    Half of the share is kept for the oldest of the best priority, so that short ones cannot starve a long one. Returns
    (sequence, tokens > 0); each tokens <= sequence.remaining.
    """
    if not prompts or share <= 0:
        return []
    oldest = min(prompts, key=rank)
    kept = min(oldest.remaining, (share + 1) // 2)
    chunks: list[tuple[Sequence, int]] = []
    for seq in sorted(prompts, key=lambda seq: (seq.request.priority, seq.remaining, seq.arrival)):
        if seq is oldest:
            kept = 0
        tokens = min(seq.remaining, share - kept)
        if tokens > 0:
            chunks.append((seq, tokens))
            share -= tokens
    return chunks
