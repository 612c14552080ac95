"""Who goes first: order of the running and the waiting, share of the prompts in a step.

Pure functions used by `Scheduler`, engine process.
"""

from scheduler.image_spans import head_span, uncut
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


def split_prompts(running: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """(those with one token to compute, which is no image's, and one to sample then; the others), both in the order of
    `running`."""
    decodes: list[Sequence] = []
    prompts: list[Sequence] = []
    for seq in running:
        follows = seq.num_computed == len(seq.tokens) - 1 and seq.num_computed >= seq.image_end
        (decodes if follows and seq.request.pooling is None else prompts).append(seq)
    return decodes, prompts


def split_share(
    prompts: list[tuple[Sequence, int]], share: int, limit: int, *, whole_spans: bool
) -> list[tuple[Sequence, int]]:
    """Divide `share` tokens among (sequence, tokens that it could compute), best priority and fewest tokens first.

    Half of the share is kept for the oldest of the best priority, so that short ones cannot starve a long one. With
    `whole_spans` no chunk ends inside a span of an image: the oldest may exceed the share by the span at its head, and
    so may one other, as far as all together stay within `limit`. Returns (sequence, tokens > 0).
    """
    if not prompts or share <= 0:
        return []
    oldest, most = min(prompts, key=lambda prompt: rank(prompt[0]))
    kept = min(most, (share + 1) // 2)
    if whole_spans:
        kept = uncut(oldest, kept) or head_span(oldest)
        assert kept <= limit, f"a span of {kept} tokens in a step that holds {limit}"
    chunks: list[tuple[Sequence, int]] = []
    exceeds = False
    for seq, ready in sorted(prompts, key=lambda prompt: (prompt[0].request.priority, prompt[1], prompt[0].arrival)):
        room, kept = (max(share, kept), 0) if seq is oldest else (share - kept, kept)
        tokens = min(ready, room)
        if whole_spans and tokens > 0:
            tokens = uncut(seq, tokens)
            if tokens == 0 and not exceeds and head_span(seq) + kept <= limit:
                tokens, exceeds = head_span(seq), True
        if tokens > 0:
            chunks.append((seq, tokens))
            share -= tokens
            limit -= tokens
    return chunks
