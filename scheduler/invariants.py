"""What must hold for the queues between steps. Used by `Scheduler.check_invariants`: in the simulation at every step,
in the engine process whenever it goes idle.
"""

from scheduler import policy
from scheduler.sequence import Sequence, Status


def check_queues(
    running: list[Sequence], waiting: list[Sequence], live: dict[int, Sequence], num_prompt: int, max_num_seqs: int
) -> None:
    """Assert that every live sequence is in one queue, in its place, with counts in range, and that their prompts have
    `num_prompt` tokens together. O(sequences)."""
    assert running == sorted(running, key=policy.rank), "running sequences are out of order"
    assert waiting == sorted(waiting, key=policy.queue_rank), "the queue is out of order"
    assert len(running) <= max_num_seqs, "too many sequences run"
    queued = running + waiting
    assert {seq.request.seq_id: seq for seq in queued} == live, "a live sequence is not in exactly one queue"
    assert len(queued) == len(live), "a sequence is queued twice"
    assert num_prompt == sum(seq.num_prompt for seq in queued), "prompt tokens are miscounted"
    for seq in queued:
        assert seq.status is (Status.RUNNING if seq.blocks else Status.WAITING), "status and blocks disagree"
        assert 0 <= seq.num_computed < len(seq.tokens), "token counts are out of range"
        assert seq.room_to_start <= seq.max_total, "a sequence with all its tokens goes on"
        assert seq.blocks or seq.num_computed == 0, "computed tokens without blocks"
