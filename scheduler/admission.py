"""What is refused at the door, and who had better wait inside. Used by `Scheduler`, engine process."""

from collections.abc import Mapping

from scheduler.config import SchedulerConfig
from scheduler.kv_blocks import KVBlocks
from scheduler.request import NeverFits, QueueFull, Request
from scheduler.sequence import Sequence


def refuse_what_never_fits(request: Request, max_model_len: int, num_blocks: int, config: SchedulerConfig) -> None:
    """Raise NeverFits unless the known tokens and, if one is sampled, one more can be had. max_tokens is a limit and
    not a reservation: a sequence that would outgrow the model or the whole KV pool ends with LENGTH there."""
    num_prompt, num_outputs = len(request.prompt_ids), len(request.output_ids)
    assert num_prompt > 0, f"sequence {request.seq_id} has an empty prompt"
    assert num_outputs < request.sampling.max_tokens, f"sequence {request.seq_id} has had all its tokens"
    assert request.pooling is None or not num_outputs, f"sequence {request.seq_id} is pooled and has had tokens"
    num_tokens = num_prompt + num_outputs + (request.pooling is None)
    if num_tokens > max_model_len:
        raise NeverFits(num_tokens, max_model_len, "tokens")
    needed = -(-num_tokens // config.block_size)
    if needed > num_blocks:
        raise NeverFits(needed, num_blocks, "KV blocks")
    if num_prompt > config.max_queued_tokens:
        raise NeverFits(num_prompt, config.max_queued_tokens, "queued prompt tokens")


def refuse_overload(num_prompt: int, num_live: int, live_prompt_tokens: int, config: SchedulerConfig) -> None:
    """Raise QueueFull if the accepted sequences leave no place for one more."""
    if num_live >= config.max_outstanding:
        raise QueueFull(f"{num_live} sequences are running or waiting, and that is the limit")
    if live_prompt_tokens + num_prompt > config.max_queued_tokens:
        raise QueueFull(
            f"{live_prompt_tokens} prompt tokens are running or waiting, and {num_prompt} more would exceed "
            f"the limit of {config.max_queued_tokens}"
        )


def awaits_prefix(seq: Sequence, prompts: list[Sequence], live: Mapping[int, Sequence], kv: KVBlocks) -> bool:
    """Whether blocks that a waiting sequence needs are about to be computed: by its leader, or by another of its rank
    among `prompts`."""
    if any(other.request.priority <= seq.request.priority and kv.awaits(seq, other) for other in prompts):
        return True
    leader = None if seq.request.leader is None else live.get(seq.request.leader)
    if leader is None or leader.num_outputs > 0 or leader.arrival >= seq.arrival:
        return False
    return kv.awaits(seq, leader)
