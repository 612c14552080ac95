"""From a step's result to what a sequence's owner is told. Pure functions used by `Scheduler`, engine process."""

from array import array
from math import isfinite

from scheduler.plan import FAILED_TOKEN, RowLogprobs
from scheduler.request import FinishReason, TokenEvent, TokenLogprob
from scheduler.sequence import Sequence, Status
from scheduler.speculation import verify

NOT_FINITE = "the model's output was not finite"


def logprob_at(rows: RowLogprobs, row: int) -> TokenLogprob:
    """Log-probability of one row with its alternatives."""
    start, end = rows.top_offsets[row], rows.top_offsets[row + 1]
    top = tuple(zip(rows.top_ids[start:end], rows.top_values[start:end], strict=True))
    return TokenLogprob(value=rows.chosen[row], top=top, rank=rows.ranks[row])


def ending(seq: Sequence) -> tuple[FinishReason | None, int | None]:
    """Whether the newest token ends the sequence: (reason, member of stop_token_ids that did it)."""
    sampling, token = seq.request.sampling, seq.tokens[-1]
    if token in sampling.eos_token_ids:
        return FinishReason.STOP, None
    if token in sampling.stop_token_ids:
        return FinishReason.STOP, token
    return (FinishReason.LENGTH if len(seq.tokens) >= seq.max_total else None), None


def take_tokens(seq: Sequence, token_ids: "array[int]", row: int, drafts: "array[int]") -> tuple[int, bool]:
    """Append what one step after the other would have sampled: up to the first draft that does not hold, the end of the
    sequence, or a failed row. Returns (tokens appended, whether a row failed).

    `token_ids` int32 has from `row` on what follows the tokens of the sequence and none, one, ... of its drafts.
    """
    for count in range(verify(token_ids[row : row + len(drafts)], drafts) + 1 if drafts else 1):
        token = token_ids[row + count]
        if token == FAILED_TOKEN:
            return count, True
        seq.tokens.append(token)
        if drafts and ending(seq)[0] is not None:
            return count + 1, False
    return count + 1, False


def failure(seq: Sequence) -> tuple[FinishReason, str]:
    """How a sequence ends of which no token could be sampled: (reason, message)."""
    if seq.request.sampling.grammar is not None:
        return FinishReason.DEAD_END, (
            "no token is left that the grammar allows and that is not banned, or the grammar became too complex"
        )
    return FinishReason.ERROR, NOT_FINITE


def token_event(seq: Sequence, sampled: RowLogprobs, row: int, count: int, num_drafts: int) -> TokenEvent:
    """The event of the newest `count` tokens, sampled by the rows from `row` on; the first one also tells about the
    prompt."""
    request = seq.request
    first = seq.num_outputs == count
    reason, stop_token = ending(seq)
    token_ids = (seq.tokens[-1],) if count == 1 else tuple(seq.tokens[-count:])
    if reason is None and not first and request.sampling.logprobs < 0:
        return TokenEvent(request.seq_id, token_ids, num_drafts)  # nearly always, and in half the time
    wants_logprobs = request.sampling.logprobs >= 0
    return TokenEvent(
        seq_id=request.seq_id,
        token_ids=token_ids,
        num_drafts=num_drafts,
        logprobs=tuple(logprob_at(sampled, row + index) for index in range(count)) if wants_logprobs else (),
        prompt_logprobs=tuple(seq.prompt_scores) if first else (),
        cached_tokens=(seq.prefix_hit or 0) if first else 0,
        finish_reason=reason,
        stop_token_id=stop_token,
    )


def pooled_event(seq: Sequence) -> TokenEvent:
    """The only event of a sequence that is pooled, when its prompt is computed."""
    if not all(map(isfinite, seq.pool_sum)):
        return TokenEvent(seq.request.seq_id, finish_reason=FinishReason.ERROR, message=NOT_FINITE)
    return TokenEvent(
        seq.request.seq_id,
        cached_tokens=seq.prefix_hit or 0,
        finish_reason=FinishReason.STOP,
        pooled=seq.pool_sum.tobytes(),
    )


def whereabouts(seq: Sequence) -> str:
    """How far a live sequence has come, for people."""
    return "in the queue" if seq.status is Status.WAITING else f"after {seq.num_outputs} output tokens"
